"""Hooks into Megatron's loading: checkpoints are opened here, and states fitted to what they hold.

A load opens a torch_dist checkpoint in this package, reads manifests, and drops requests for
optional entries that the checkpoint lacks; what Megatron then reads is checked as it is read.
States that this package did not produce pass unchanged.

Megatron reads ``common.pt`` and ``--ckpt-format torch`` with ``weights_only``, which runs no code.
"""

import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.validation import StrictHandling, parse_strict_flag
from torch.distributed.checkpoint.api import CheckpointException

from moe_optim.calibration.state_entries import CalibratedEntry, OptionalShardedTensor
from moe_optim.checkpoint.files.folders import is_local
from moe_optim.checkpoint.files.torch_dist import TorchDistReader
from moe_optim.checkpoint.flat_states import (
    ManifestRequest,
    flat_states_to_load,
    require_same_interleave,
)
from moe_optim.checkpoint.integrity import require_intact
from moe_optim.checkpoint.load_session import (
    end_session,
    get_filesystem_reader,
    into_views,
    open_alone,
    open_session,
    own_errors,
    reading,
    together,
)
from moe_optim.checkpoint.staging import plan_quickly
from moe_optim.checkpoint.state_kinds import MOMENTUM, require_same_optimizer, state_kinds
from moe_optim.checkpoint.state_manifest import MANIFEST, StateManifest, states_with_manifests
from moe_optim.errors import LayoutError
from moe_optim.integration.agreement import agree
from moe_optim.integration.engine import original
from moe_optim.integration.installation import (
    config_or_bf16,
    installed_config,
    installed_optimizer,
)
from moe_optim.weights.grouped_weight import GroupedWeight

_ACCOUNTED = "moe_optim_accounted"
_OBJECT_KEY = re.compile(r"[^/]+/shard_[0-9.]+_[0-9.]+")
_CORE = "megatron.core.dist_checkpointing"
_TENSORS_METADATA = f"{_CORE}.strategies.torch:TorchDistLoadShardedStrategy.load_tensors_metadata"


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

    Tensors are read into the memory of weights and states, so a load that raises while it reads
    leaves some of them replaced: load another checkpoint before the next step.

    Raises:
        StateError: files of the checkpoint are missing or damaged; lists all of them.
        LayoutError: flat optimizer states have other parameters, or an order that cannot be
            derived; gate and up are interleaved differently; or objects are not plain data.
    """
    stored = None
    requesting = list(states_with_manifests(sharded_state_dict))
    if not is_local(checkpoint_dir):
        for state in requesting:  # Megatron loads manifests; they are compared with the states
            asked = state[MANIFEST]
            form = asked.global_shape, asked.global_offset, asked.replica_id
            state[MANIFEST] = ShardedObject(asked.key, None, *form)
    elif installed_config() is not None or requesting:
        stored = open_session(Path(checkpoint_dir), process_group)
        agree(lambda: _resolve(sharded_state_dict, requesting, stored), process_group)
        if StrictHandling.requires_global_app_metadata(parse_strict_flag(strict)):
            sharded_state_dict = {**sharded_state_dict, _ACCOUNTED: _read_already(stored)}
    _request_values(sharded_state_dict)
    try:
        views = nullcontext() if stored is None else into_views(sharded_strategy)
        with reading(stored, process_group), plan_quickly(), views:
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


def _request_values(sharded_state_dict: Any) -> None:
    """Request plain values for quantized weights, which ``load_state_dict`` copies into them."""
    for entry in nested_values(sharded_state_dict):
        if isinstance(entry, ShardedTensor) and isinstance(entry.data, GroupedWeight):
            shape, device = entry.data.shape, entry.data.device
            entry.data = torch.empty(shape, dtype=torch.bfloat16, device=device)


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
    from moe_optim.checkpoint.undistributed_states import declare_reshardable

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


def get_checkpoint_format(checkpoint_name: str, args: Any) -> Any:
    """Return the format of a checkpoint and open or verify it; arguments are Megatron's.

    Every rank of an initialized process group must call it: ranks share the reading. StateError
    lists all missing or damaged files.
    """
    found = original("megatron.training.checkpointing:_get_checkpoint_format")(
        checkpoint_name, args
    )
    if installed_config() is not None and is_local(checkpoint_name):
        folder, is_joined = Path(checkpoint_name), torch.distributed.is_initialized()
        if found == "torch":
            if is_joined:
                _require_intact_files(folder)
            else:  # only arguments are read; the load follows
                require_intact(folder, thorough=False)
        elif found == "torch_dist" and is_joined:
            open_session(folder, None)
    return found


def _require_intact_files(folder: Path) -> None:
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    thorough = config_or_bf16().check_on_load != "quick"  # Megatron's reads compare nothing
    agree(lambda: require_intact(folder, thorough=thorough, part=rank, parts=ranks), None)


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


def _resolve(
    sharded_state_dict: Any, requesting: list[dict[Any, Any]], stored: TorchDistReader
) -> None:
    checkpoint = str(stored.path)
    _fit_optional(sharded_state_dict, stored)
    manifests = [key for key in stored.objects if f".{MANIFEST}." in key]
    if requesting:
        keys = (state[MANIFEST].requester.optimizer.optimizer_state_keys for state in requesting)
        require_same_optimizer(
            state_kinds(stored.tensors),
            checkpoint,
            is_muon=installed_optimizer() == "muon",
            has_matrices=any(MOMENTUM in held for held in keys),
        )
    for state in requesting:
        request = state.pop(MANIFEST)
        optimizer, is_flat = request.requester.optimizer, request.requester.is_flat
        for any_key in manifests[:1]:  # all record the same interleave
            saved = StateManifest.from_dict(stored.read_object(any_key), any_key)
            require_same_interleave(optimizer, saved, checkpoint, is_flat=is_flat)
        if is_flat:
            key = _find_key(manifests, request, checkpoint)
            state["param_state"] = _request_flat(request, stored, key)
        else:
            _request_by_name(state, request, stored)


def _request_flat(
    request: ManifestRequest, stored: TorchDistReader, key: str | None
) -> dict[str, Any]:
    """Return requests for flat states by the manifest under a key; None derives one."""
    if key is not None:
        saved = StateManifest.from_dict(stored.read_object(key), key)
    else:
        from moe_optim.checkpoint.states_without_manifest import manifest_of_groups_states

        key, saved = manifest_of_groups_states(request, stored)
    return flat_states_to_load(request.requester.optimizer, saved, key)


def _request_by_name(
    state: dict[Any, Any], request: ManifestRequest, stored: TorchDistReader
) -> None:
    """Fit requests by name to the keys in a checkpoint, and to flat states of stock beside them."""
    from moe_optim.checkpoint.undistributed_states import (
        flat_group_beside,
        request_whole_states,
        require_same_states,
    )

    group = flat_group_beside(stored, request.group)
    if group is None or MOMENTUM in request.requester.optimizer.optimizer_state_keys:
        request_whole_states(state["param_state"], stored)
        require_same_states(state["param_state"], stored)
    else:
        request.key = f"{group}.{MANIFEST}.none"
        state["param_state"] = _request_flat(request, stored, None)


def _find_key(manifests: list[str], request: ManifestRequest, checkpoint: str) -> str | None:
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
