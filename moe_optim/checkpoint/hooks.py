"""Hooks into Megatron's saving and loading of torch_dist checkpoints.

A load opens the checkpoint in this package, reads manifests, and drops requests for optional
entries that the checkpoint lacks; what Megatron then reads is checked as it is read. A save records
checksums before it declares the checkpoint complete. States that this package did not produce pass
unchanged.

Megatron reads ``common.pt`` and ``--ckpt-format torch`` with ``weights_only``, which runs no code.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.dist_checkpointing.validation import StrictHandling, parse_strict_flag
from torch.distributed.checkpoint.api import CheckpointException

from moe_optim.calibration.state_entries import (
    CalibratedEntry,
    OptionalShardedTensor,
    complete_amaxes,
)
from moe_optim.checkpoint.checked_reading import (
    get_filesystem_reader,
    own_errors,
    reading,
    together,
)
from moe_optim.checkpoint.files.torch_dist import TorchDistReader
from moe_optim.checkpoint.flat_states import (
    ManifestRequest,
    flat_states_to_load,
    require_same_interleave,
)
from moe_optim.checkpoint.integrity import require_intact
from moe_optim.checkpoint.load_session import end_session, open_alone, open_session
from moe_optim.checkpoint.plan_validation import validate_quickly
from moe_optim.checkpoint.read_planning import plan_quickly
from moe_optim.checkpoint.sealing import invalidate, record_config, record_data
from moe_optim.checkpoint.staging import MadeTensor, synchronously
from moe_optim.checkpoint.state_kinds import MOMENTUM, require_same_optimizer, state_kinds
from moe_optim.checkpoint.state_manifest import MANIFEST, StateManifest
from moe_optim.checkpoint.states_without_manifest import manifest_of_groups_states
from moe_optim.checkpoint.undistributed_states import (
    declare_reshardable,
    flat_group_beside,
    request_whole_states,
    require_same_states,
)
from moe_optim.errors import LayoutError
from moe_optim.integration.agreement import agree
from moe_optim.integration.engine import original
from moe_optim.integration.installation import (
    installed_config,
    installed_optimizer,
)
from moe_optim.weights.te.fields import is_tensorwise, read_values, te_formats_of

_ACCOUNTED = "moe_optim_accounted"
_OBJECT_KEY = re.compile(r"[^/]+/shard_[0-9.]+_[0-9.]+")
_CORE = "megatron.core.dist_checkpointing"
_TENSORS_METADATA = f"{_CORE}.strategies.torch:TorchDistLoadShardedStrategy.load_tensors_metadata"


def save(  # noqa: PLR0913  # Megatron's
    sharded_state_dict: Any,
    checkpoint_dir: str,
    sharded_strategy: Any = None,
    validate_access_integrity: bool = True,
    async_sharded_save: bool = False,
    preprocess_common_before_consistancy_check: Any = None,
    content_metadata: dict[str, Any] | None = None,
    async_strategy: str | None = "nvrx",
    verify_integrity: bool = False,
) -> Any:
    """Save a distributed checkpoint; arguments and result are Megatron's. Every rank must call it.

    An overwritten checkpoint counts as incomplete until the new one is complete and its checksums
    are recorded.
    """
    folder = Path(checkpoint_dir)
    is_ours = is_local(checkpoint_dir) and (
        installed_config() is not None or any(_states_with_manifests(sharded_state_dict))
    )
    if installed_config() is not None:
        complete_amaxes(sharded_state_dict)
    _save_values(sharded_state_dict)
    if async_sharded_save:
        _detach_from_host_memory(sharded_state_dict)
    if is_ours:
        on_first_rank(lambda: invalidate(folder))
    stock = original(f"{_CORE}:save")
    with validate_quickly(), nullcontext() if async_sharded_save else synchronously():
        request = stock(
            sharded_state_dict,
            checkpoint_dir,
            sharded_strategy,
            validate_access_integrity,
            True,  # a request of Megatron's own, which this executes below
            preprocess_common_before_consistancy_check,
            content_metadata,
            async_strategy if async_sharded_save else "mcore",
            verify_integrity,
        )
    if is_ours:
        # the last functions write metadata.json and, if asked to, Megatron's checksums of all files
        *data, write_config = request.finalize_fns[: -1 if verify_integrity else None]
        request.finalize_fns[: len(data) + 1] = [
            *data,
            lambda: record_data(folder),
            write_config,
            lambda: on_first_rank(lambda: record_config(folder)),
        ]
    if async_sharded_save:
        return request
    request.execute_sync()
    return None


def is_local(checkpoint_dir: str | Path) -> bool:
    """Return whether files can be opened here; only Megatron reads ``msc://`` and similar URLs."""
    return "://" not in str(checkpoint_dir)


def _save_values(sharded_state_dict: Any) -> None:
    """Replace Transformer Engine weights by bf16 values where Megatron's writers would not.

    Megatron's writers convert on GPUs only, and block formats only on some of them. Other weights
    are left to them, which convert one weight at a time.
    """
    if installed_config() is None:
        return
    kinds = (ShardedTensor, ShardedTensorFactory)
    for entry in nested_values(sharded_state_dict):
        if isinstance(entry, kinds) and _is_saved_as_it_lies(entry.data):
            entry.data = read_values(entry.data)


def _detach_from_host_memory(sharded_state_dict: Any) -> None:
    """Copy states in host memory, which a step must not change while they are written.

    Megatron copies views of larger memory, and everything on GPUs.
    """
    for entry in nested_values(sharded_state_dict):
        is_box = isinstance(entry, ShardedTensor) and not entry.has_regular_grid
        if isinstance(entry, MadeTensor):
            entry.data = entry.make()
        elif is_box and entry.data.device.type == "cpu":
            entry.data = entry.data.clone()


def _is_saved_as_it_lies(weight: Any) -> bool:
    is_on_host = isinstance(weight, torch.Tensor) and weight.device.type == "cpu"
    return bool(te_formats_of(weight)) or (is_on_host and is_tensorwise(weight))


def _request_as_objects(sharded_state_dict: Any) -> None:
    """Let Megatron load manifests itself; they are compared when states are loaded."""
    for state in list(_states_with_manifests(sharded_state_dict)):
        request = state[MANIFEST]
        state[MANIFEST] = ShardedObject(
            request.key, None, request.global_shape, request.global_offset, request.replica_id
        )


def on_first_rank(act: Callable[[], None]) -> None:
    """Call ``act`` on the first rank; raise its error on all. Every rank must call it."""
    agree(lambda: act() if torch.distributed.get_rank() == 0 else None, None)


def load(  # noqa: PLR0913  # Megatron's
    sharded_state_dict: Any,
    checkpoint_dir: str,
    sharded_strategy: Any = None,
    validate_access_integrity: bool = True,
    strict: Any = StrictHandling.ASSUME_OK_UNEXPECTED,
    verify_integrity: bool = False,
    process_group: Any = None,
) -> Any:
    """Load a distributed checkpoint; arguments and result are Megatron's. Every rank must call it.

    Raises:
        StateError: files of the checkpoint are missing or damaged; lists all of them.
        LayoutError: flat optimizer states have other parameters, or an order that cannot be
            derived; gate and up are interleaved differently; or objects are not plain data.
    """
    stored = None
    if not is_local(checkpoint_dir):
        _request_as_objects(sharded_state_dict)
    elif installed_config() is not None or any(_states_with_manifests(sharded_state_dict)):
        stored = open_session(Path(checkpoint_dir), process_group)
        agree(lambda: _resolve(sharded_state_dict, stored), process_group)
        if StrictHandling.requires_global_app_metadata(parse_strict_flag(strict)):
            sharded_state_dict = {**sharded_state_dict, _ACCOUNTED: _read_already(stored)}
    try:
        with reading(stored, process_group), plan_quickly():
            result = original(f"{_CORE}:load")(
                sharded_state_dict,
                checkpoint_dir,
                sharded_strategy,
                validate_access_integrity,
                strict,
                verify_integrity,
                process_group,
            )
    finally:
        end_session()
    state = result[0] if isinstance(result, tuple) else result
    state.pop(_ACCOUNTED, None)
    return result


def _read_already(stored: TorchDistReader) -> dict[str, ShardedObject]:
    """Return requests for the manifests already read, which strict loads expect."""
    rank = torch.distributed.get_rank()
    return {
        key: ShardedObject.empty_from_unique_key(key, replica_id=rank)
        for key in stored.objects
        if f".{MANIFEST}." in key and _OBJECT_KEY.fullmatch(key)
    }


def load_common_state_dict(checkpoint_dir: str | Path) -> Any:
    """Load the common state, the first part that is read.

    No rank communicates, except in a load of states: there an error of one rank is raised on all.
    StateError lists all missing or damaged files; LayoutError if the state is not plain data.
    """
    return together(lambda: _load_common(checkpoint_dir))


def _load_common(checkpoint_dir: str | Path) -> Any:
    stock = original(f"{_CORE}:load_common_state_dict")
    if installed_config() is None or not is_local(checkpoint_dir):
        return stock(checkpoint_dir)
    folder = Path(checkpoint_dir)
    stored = open_alone(folder)
    if (file := stored.common_file) is not None:
        with stored.opened(file) as archive:
            archive.compare_checksums()  # Megatron opens it itself
    with own_errors():
        try:
            with reading(stored):
                common = stock(checkpoint_dir)
        except CheckpointException:
            raise
        except Exception:  # arbitrary errors of damaged files; report the file if that is the cause
            require_intact(folder, thorough=True)
            raise
    declare_reshardable(common, stored)
    return common


def load_tensors_metadata(self: Any, checkpoint_dir: Path, metadata: Any = None) -> Any:
    """Return the tensors of a checkpoint without data; arguments and result are Megatron's.

    Megatron passes every recorded tensor property to a constructor. torch 2.15 records strides,
    which no constructor accepts, so all strict loads would fail without this hook.
    """
    if metadata is None:
        metadata = get_filesystem_reader(checkpoint_dir).read_metadata()
    for entry in metadata.state_dict_metadata.values():
        if hasattr(entry, "properties"):  # a tensor
            vars(entry.properties).pop("strides", None)
    return original(_TENSORS_METADATA)(self, checkpoint_dir, metadata)


def _states_with_manifests(state: Any) -> Iterator[dict[Any, Any]]:
    """Yield every dict in a nested state that contains a manifest or a request for one."""
    if isinstance(state, dict) and MANIFEST in state:
        yield state
    for value in state.values() if isinstance(state, dict) else state:
        if isinstance(value, dict | list):
            yield from _states_with_manifests(value)


def _fit_optional(state: Any, stored: TorchDistReader) -> None:
    """Drop requests for optional entries that a checkpoint lacks; fit the others to it."""
    entries = list(state.items() if isinstance(state, dict) else enumerate(state))
    for key, value in reversed(entries):  # so that list indices stay valid
        if isinstance(value, dict | list):
            _fit_optional(value, stored)
        elif not isinstance(value, OptionalShardedTensor | CalibratedEntry):
            continue
        elif value.key not in stored.tensors:
            del state[key]
        elif isinstance(value, CalibratedEntry):
            state[key] = value.request(stored.tensors[value.key].shape)


def _resolve(sharded_state_dict: Any, stored: TorchDistReader) -> None:
    """Replace manifest requests by requests for the states in the checkpoint."""
    checkpoint = stored.path
    _fit_optional(sharded_state_dict, stored)
    manifests = [key for key in stored.objects if f".{MANIFEST}." in key]
    requesting = list(_states_with_manifests(sharded_state_dict))
    if requesting:
        keys = (state[MANIFEST].requester.optimizer.optimizer_state_keys for state in requesting)
        require_same_optimizer(
            state_kinds(stored.tensors),
            str(checkpoint),
            is_muon=installed_optimizer() == "muon",
            has_matrices=any(MOMENTUM in held for held in keys),
        )
    for state in requesting:
        request = state.pop(MANIFEST)
        requester = request.requester
        for key in manifests[:1]:  # all record the same interleave
            saved = StateManifest.from_dict(stored.read_object(key), key)
            require_same_interleave(
                requester.optimizer, saved, str(checkpoint), is_flat=requester.is_flat
            )
        if not requester.is_flat:
            _request_by_name(state, request, stored)
            continue
        own = _find_key(manifests, request, checkpoint)
        key, saved = (
            (own, StateManifest.from_dict(stored.read_object(own), own))
            if own is not None
            else manifest_of_groups_states(request, stored)
        )
        state["param_state"] = flat_states_to_load(requester.optimizer, saved, key)


def _request_by_name(
    state: dict[Any, Any], request: ManifestRequest, stored: TorchDistReader
) -> None:
    """Fit requests by name to the keys in a checkpoint, and to flat states of stock beside them."""
    optimizer = request.requester.optimizer
    group = flat_group_beside(stored, request.group)
    if group is None or MOMENTUM in optimizer.optimizer_state_keys:
        request_whole_states(state["param_state"], stored)
        require_same_states(state["param_state"], stored)
        return
    request.key = f"{group}.{MANIFEST}.none"
    key, saved = manifest_of_groups_states(request, stored)
    state["param_state"] = flat_states_to_load(optimizer, saved, key)


def _find_key(manifests: list[str], request: ManifestRequest, checkpoint: Path) -> str | None:
    """Return the key of a data-parallel group's manifest, None if the checkpoint has none."""
    group = request.group
    of_group = [key for key in manifests if key.startswith(f"{group}.{MANIFEST}.")]
    exact = [key for key in of_group if key.startswith(f"{request.key}/")]
    if manifests and not of_group:
        others = sorted({key.partition(f".{MANIFEST}.")[0] for key in manifests})
        raise LayoutError(
            f"{checkpoint}: expected flat optimizer states of {group}, got those of "
            f"{', '.join(others)}. Load with the tensor, pipeline and expert parallel sizes they "
            "were saved with, or a checkpoint that was saved fully reshardable "
            "(--dist-ckpt-optim-fully-reshardable)."
        )
    return next(iter(exact or of_group), None)
