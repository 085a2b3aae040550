"""Megatron's saving and loading of checkpoints, with what this package does before and after.

Before loading: damage is looked for, manifests are read, and what the checkpoint lacks of extras is
not asked for. After saving: checksums are recorded. Both leave states alone in which nothing of
this package asks for anything.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.dist_checkpointing.validation import StrictHandling, parse_strict_flag

from moe_optim.checkpoints.integrity import invalidate, require_intact, seal
from moe_optim.checkpoints.torch_dist import TorchDistReader
from moe_optim.errors import ConfigError, LayoutError, NonFiniteError, PatchError, StateError
from moe_optim.layout.state_manifest import MANIFEST, StateManifest
from moe_optim.megatron.expert_amax import OptionalShardedTensor
from moe_optim.megatron.optimizer_state import (
    ManifestRequest,
    require_same_interleave,
)
from moe_optim.megatron.plugin import config_in_force, installed_config
from moe_optim.megatron.te_fields import read_values, te_formats_of

_ACCOUNTED = "moe_optim_accounted"
_stock_load = dist_checkpointing.load
_stock_save = dist_checkpointing.save
_stock_load_common_state_dict = dist_checkpointing.load_common_state_dict


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

    A checkpoint that is written over counts as incomplete until the new one is whole. When it is,
    a seal is written with checksums of it.
    """
    folder = Path(checkpoint_dir)
    is_ours = _is_local(checkpoint_dir) and any(_holders_of_manifests(sharded_state_dict))
    _save_values(sharded_state_dict)
    if is_ours:
        _on_first_rank(lambda: invalidate(folder))
    request = _stock_save(
        sharded_state_dict,
        checkpoint_dir,
        sharded_strategy,
        validate_access_integrity,
        async_sharded_save,
        preprocess_common_before_consistancy_check,
        content_metadata,
        async_strategy,
        verify_integrity,
    )
    if is_ours and request is None:
        _on_first_rank(lambda: seal(folder))
    elif is_ours:
        request.finalize_fns.append(lambda: _on_first_rank(lambda: seal(folder)))
    return request


def _is_local(checkpoint_dir: str | Path) -> bool:
    """Return whether files can be looked at; ``msc://`` and the like are Megatron's to read."""
    return "://" not in str(checkpoint_dir)


def _save_values(sharded_state_dict: Any) -> None:
    """Have weights of Transformer Engine saved as bf16 values, wherever they are.

    Megatron's writers do that on a GPU alone, and by kernels that not every GPU has.
    """
    if installed_config() is None:
        return
    kinds = (ShardedTensor, ShardedTensorFactory)
    for entry in nested_values(sharded_state_dict):
        if isinstance(entry, kinds) and te_formats_of(entry.data):
            entry.data = read_values(entry.data)


def _ask_plainly(sharded_state_dict: Any) -> None:
    """Have Megatron load manifests as any object; they are compared when states are loaded."""
    for state in list(_holders_of_manifests(sharded_state_dict)):
        request = state[MANIFEST]
        state[MANIFEST] = ShardedObject(
            request.key, None, request.global_shape, request.global_offset, request.replica_id
        )


def _on_first_rank(act: Callable[[], None]) -> None:
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
        StateError: a file of the checkpoint is missing or damaged; all of them are named.
        LayoutError: flat optimizer states of other experts, or of experts in an unknown order; or
            another interleaving of gate and up.
    """
    if not _is_local(checkpoint_dir):
        _ask_plainly(sharded_state_dict)
    elif installed_config() is not None or any(_holders_of_manifests(sharded_state_dict)):
        folder = Path(checkpoint_dir)
        agree(lambda: _check(folder, process_group), process_group)
        agree(lambda: _resolve(sharded_state_dict, folder), process_group)
        if StrictHandling.requires_global_app_metadata(parse_strict_flag(strict)):
            sharded_state_dict = {**sharded_state_dict, _ACCOUNTED: _read_already(folder)}
    result = _stock_load(
        sharded_state_dict,
        checkpoint_dir,
        sharded_strategy,
        validate_access_integrity,
        strict,
        verify_integrity,
        process_group,
    )
    state = result[0] if isinstance(result, tuple) else result
    state.pop(_ACCOUNTED, None)
    return result


def _read_already(checkpoint: Path) -> dict[str, ShardedObject]:
    """Return requests for manifests, which have been read; strict loads would miss them."""
    rank = torch.distributed.get_rank()
    return {
        key: ShardedObject.empty_from_unique_key(key, replica_id=rank)
        for key in TorchDistReader(checkpoint).objects
        if f".{MANIFEST}." in key
    }


def load_common_state_dict(checkpoint_dir: str | Path) -> Any:
    """Load what is not sharded, the first that is read of a checkpoint. No rank communicates.

    Raises:
        StateError: a file of the checkpoint is missing or damaged; all of them are named.
    """
    if installed_config() is None or not _is_local(checkpoint_dir):
        return _stock_load_common_state_dict(checkpoint_dir)
    require_intact(Path(checkpoint_dir), thorough=False)
    try:
        return _stock_load_common_state_dict(checkpoint_dir)
    except Exception:  # whatever damaged bytes make of themselves: say which, if it was they
        require_intact(Path(checkpoint_dir), thorough=True)
        raise


def _check(folder: Path, group: Any) -> None:
    """Look for damage; ranks share the reading."""
    require_intact(
        folder,
        thorough=config_in_force().check_on_load == "thorough",
        part=torch.distributed.get_rank(group),
        parts=torch.distributed.get_world_size(group),
    )


def agree(act: Callable[[], Any], group: Any) -> Any:
    """Call ``act`` on every rank of ``group``; raise on all of them what one of them raised.

    Otherwise those without an error would wait for the others in the next collective.
    """
    error: Exception | None = None
    result = None
    try:
        result = act()
    except Exception as raised:  # whatever it is, the others must not wait for this rank
        error = raised
    errors: list[Any] = [None] * torch.distributed.get_world_size(group)
    kinds = (ConfigError, LayoutError, NonFiniteError, PatchError)
    kind = next((kind for kind in kinds if isinstance(error, kind)), StateError)
    torch.distributed.all_gather_object(errors, error and (kind, str(error)), group=group)
    if error is not None:
        raise error
    for rank, other in enumerate(errors):
        if other is not None:
            kind, message = other
            raise kind(f"rank {rank}: {message}")
    return result


def _holders_of_manifests(state: Any) -> Iterator[dict[Any, Any]]:
    """Yield every dict in a nested state that holds a manifest or asks for one."""
    if isinstance(state, dict) and MANIFEST in state:
        yield state
    for value in state.values() if isinstance(state, dict) else state:
        if isinstance(value, dict | list):
            yield from _holders_of_manifests(value)


def _drop_absent(state: Any, present: set[str]) -> None:
    """Take out entries that a checkpoint need not have, where it does not have them."""
    entries = list(state.items() if isinstance(state, dict) else enumerate(state))
    for key, value in reversed(entries):  # so that places in a list stay true
        if isinstance(value, OptionalShardedTensor) and value.key not in present:
            del state[key]
        elif isinstance(value, dict | list):
            _drop_absent(value, present)


def _resolve(sharded_state_dict: Any, checkpoint: Path) -> None:
    """Replace every request for a manifest by requests for what the checkpoint holds."""
    stored = TorchDistReader(checkpoint)
    _drop_absent(sharded_state_dict, set(stored.tensors))
    manifests = [key for key in stored.objects if f".{MANIFEST}." in key]
    for state in list(_holders_of_manifests(sharded_state_dict)):
        request = state.pop(MANIFEST)
        for key in manifests[:1]:  # all say the same of this
            saved = StateManifest.from_dict(stored.read_object(key), key)
            require_same_interleave(request.optimizer, saved, str(checkpoint))
        if not request.is_flat:
            continue
        found = None
        if own := _find_key(manifests, request, checkpoint):
            found = own, StateManifest.from_dict(stored.read_object(own), own)
        request.optimizer.request_flat_states(state, found, str(checkpoint))


def _find_key(manifests: list[str], request: ManifestRequest, checkpoint: Path) -> str | None:
    """Return the key of the manifest of a data-parallel group, None if there is none at all."""
    group = request.key[: request.key.index(f".{MANIFEST}.")]
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
