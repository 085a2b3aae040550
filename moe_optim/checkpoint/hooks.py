"""Megatron's saving and loading of checkpoints, with what this package does before and after.

Before loading: damage is looked for, and what would run code where Megatron unpickles it; manifests
are read, and what the checkpoint lacks of extras is not asked for. After saving: checksums are
recorded. Both leave states alone in which nothing of this package asks for anything.

Megatron unpickles ``.metadata`` and the objects of a torch_dist checkpoint by Python's own rules:
they may name any function, and it is called. Its ``common.pt``, and all of ``--ckpt-format torch``,
it reads with ``weights_only``, and need no check.
"""

import dataclasses
import enum
import re
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator
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

from moe_optim.checkpoint.files.objects import MEGATRONS_PACKAGES, require_plain
from moe_optim.checkpoint.files.plain_pickles import Named
from moe_optim.checkpoint.files.torch_dist import TorchDistReader
from moe_optim.checkpoint.flat_states import (
    ManifestRequest,
    flat_states_to_load,
    require_same_interleave,
)
from moe_optim.checkpoint.integrity import invalidate, require_intact, seal
from moe_optim.checkpoint.state_manifest import MANIFEST, StateManifest
from moe_optim.checkpoint.undistributed_states import find_masters, say_how_states_lie
from moe_optim.checkpoint.unmarked_states import manifest_of_unmarked
from moe_optim.errors import LayoutError
from moe_optim.experts.amax import OptionalShardedTensor
from moe_optim.experts.calibrated_entry import CalibratedEntry
from moe_optim.integration.agreement import agree
from moe_optim.integration.engine import original
from moe_optim.integration.installation import config_or_bf16, installed_config
from moe_optim.weights.te.fields import has_scale_a_tensor, read_values, te_formats_of

_ACCOUNTED = "moe_optim_accounted"
_OBJECT_KEY = re.compile(r"[^/]+/shard_[0-9.]+_[0-9.]+")
_CORE = "megatron.core.dist_checkpointing"


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
    is_ours = is_local(checkpoint_dir) and (
        installed_config() is not None or any(_holders_of_manifests(sharded_state_dict))
    )
    _save_values(sharded_state_dict)
    if is_ours:
        on_first_rank(lambda: invalidate(folder))
    request = original(f"{_CORE}:save")(
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
        on_first_rank(lambda: seal(folder))
    elif is_ours:
        request.finalize_fns.append(lambda: on_first_rank(lambda: seal(folder)))
    return request


def is_local(checkpoint_dir: str | Path) -> bool:
    """Return whether files can be looked at; ``msc://`` and the like are Megatron's to read."""
    return "://" not in str(checkpoint_dir)


def _save_values(sharded_state_dict: Any) -> None:
    """Have weights of Transformer Engine saved as bf16 values, wherever they are.

    Megatron's writers do that on a GPU alone, and of block formats by kernels that not every GPU
    has; what they can, they do one weight at a time, and are left to do.
    """
    if installed_config() is None:
        return
    kinds = (ShardedTensor, ShardedTensorFactory)
    for entry in nested_values(sharded_state_dict):
        if isinstance(entry, kinds) and _is_saved_as_it_lies(entry.data):
            entry.data = read_values(entry.data)


def _is_saved_as_it_lies(weight: Any) -> bool:
    """Return whether Megatron's writers would save the bytes of a quantized weight."""
    is_on_host = isinstance(weight, torch.Tensor) and weight.device.type == "cpu"
    return bool(te_formats_of(weight)) or (is_on_host and has_scale_a_tensor(weight))


def _ask_plainly(sharded_state_dict: Any) -> None:
    """Have Megatron load manifests as any object; they are compared when states are loaded."""
    for state in list(_holders_of_manifests(sharded_state_dict)):
        request = state[MANIFEST]
        state[MANIFEST] = ShardedObject(
            request.key, None, request.global_shape, request.global_offset, request.replica_id
        )


def on_first_rank(act: Callable[[], None]) -> None:
    """Act on the first rank; raise on every rank what that raises. Every rank must call it."""
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
        LayoutError: flat optimizer states of other parameters, or in an order that what was saved
            with them does not show; another interleaving of gate and up; or objects that are no
            plain data.
    """
    if not is_local(checkpoint_dir):
        _ask_plainly(sharded_state_dict)
    elif installed_config() is not None or any(_holders_of_manifests(sharded_state_dict)):
        folder = Path(checkpoint_dir)
        stored = agree(lambda: _check(folder, process_group), process_group)
        agree(lambda: _resolve(sharded_state_dict, stored), process_group)
        if StrictHandling.requires_global_app_metadata(parse_strict_flag(strict)):
            sharded_state_dict = {**sharded_state_dict, _ACCOUNTED: _read_already(stored)}
    result = original(f"{_CORE}:load")(
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


def _read_already(stored: TorchDistReader) -> dict[str, ShardedObject]:
    """Return requests for manifests, which have been read; strict loads would miss them."""
    rank = torch.distributed.get_rank()
    return {
        key: ShardedObject.empty_from_unique_key(key, replica_id=rank)
        for key in stored.objects
        if f".{MANIFEST}." in key and _OBJECT_KEY.fullmatch(key)
    }


def load_common_state_dict(checkpoint_dir: str | Path) -> Any:
    """Load what is not sharded, the first that is read of a checkpoint. No rank communicates.

    Raises:
        StateError: a file of the checkpoint is missing or damaged; all of them are named.
        LayoutError: it is no plain data.
    """
    if installed_config() is None or not is_local(checkpoint_dir):
        return original(f"{_CORE}:load_common_state_dict")(checkpoint_dir)
    folder = Path(checkpoint_dir)
    require_intact(folder, thorough=False)
    try:
        stored = TorchDistReader(folder)
        _require_plain(stored, [stored.common_key] if stored.common_key else [])
        common = original(f"{_CORE}:load_common_state_dict")(checkpoint_dir)
    except LayoutError:
        raise
    except Exception:  # whatever damaged bytes make of themselves: say which, if it was they
        require_intact(folder, thorough=True)
        raise
    say_how_states_lie(common, stored)
    return common


def _check(folder: Path, group: Any) -> TorchDistReader:
    """Look for damage, and for code; ranks share the reading. Return what the checkpoint holds."""
    rank, ranks = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    thorough = config_or_bf16().check_on_load == "thorough"
    require_intact(folder, thorough=thorough, part=rank, parts=ranks)
    stored = TorchDistReader(folder)
    _require_plain(stored, sorted(stored.objects)[rank::ranks])
    return stored


def _require_plain(stored: TorchDistReader, names: Iterable[str]) -> None:
    """Raise LayoutError for the first object that runs code where Megatron unpickles it."""
    if config_or_bf16().trust_checkpoint_code:
        return
    for name in names:
        blob = stored.blobs[name][0]
        with stored.opened(blob) as file:
            try:
                require_plain(file, _is_passive)
            except (ValueError, zipfile.BadZipFile) as error:
                raise LayoutError(
                    f"{stored.path / blob.file}: {name}: expected plain data, got an object that "
                    f"Megatron would run code for while it loads: {error}. If you trust whoever "
                    "wrote it (types of your own among its arguments are such code, too), set "
                    "moe_optim.trust_checkpoint_code=true; else load another checkpoint."
                ) from error


def _is_passive(named: Named) -> bool:
    """Return whether a name is an enumeration or dataclass of Megatron's, or its like.

    Only among modules that are loaded: nothing is imported for what a checkpoint names.
    """
    found = getattr(sys.modules.get(named.module), named.name, None)
    if not isinstance(found, type):
        return False
    # also of the class itself: a module may have others' under names of its own
    packages = {module.partition(".")[0] for module in (named.module, found.__module__)}
    is_value = issubclass(found, enum.Enum) or dataclasses.is_dataclass(found)
    return is_value and packages <= MEGATRONS_PACKAGES


def _holders_of_manifests(state: Any) -> Iterator[dict[Any, Any]]:
    """Yield every dict in a nested state that holds a manifest or asks for one."""
    if isinstance(state, dict) and MANIFEST in state:
        yield state
    for value in state.values() if isinstance(state, dict) else state:
        if isinstance(value, dict | list):
            yield from _holders_of_manifests(value)


def _fit_optional(state: Any, stored: TorchDistReader) -> None:
    """Ask for entries that a checkpoint need not have as it has them, and not where it has none."""
    entries = list(state.items() if isinstance(state, dict) else enumerate(state))
    for key, value in reversed(entries):  # so that places in a list stay true
        if isinstance(value, dict | list):
            _fit_optional(value, stored)
        elif not isinstance(value, OptionalShardedTensor | CalibratedEntry):
            continue
        elif value.key not in stored.tensors:
            del state[key]
        elif isinstance(value, CalibratedEntry):
            state[key] = value.request(stored.tensors[value.key].shape)


def _resolve(sharded_state_dict: Any, stored: TorchDistReader) -> None:
    """Replace every request for a manifest by requests for what the checkpoint holds."""
    checkpoint = stored.path
    _fit_optional(sharded_state_dict, stored)
    manifests = [key for key in stored.objects if f".{MANIFEST}." in key]
    for state in list(_holders_of_manifests(sharded_state_dict)):
        request = state.pop(MANIFEST)
        asked = request.asked
        for key in manifests[:1]:  # all say the same of this
            saved = StateManifest.from_dict(stored.read_object(key), key)
            require_same_interleave(asked.optimizer, saved, str(checkpoint), is_flat=asked.is_flat)
        if not asked.is_flat:
            find_masters(state["param_state"], stored)
            continue
        own = _find_key(manifests, request, checkpoint)
        key, saved = (
            (own, StateManifest.from_dict(stored.read_object(own), own))
            if own is not None
            else manifest_of_unmarked(request, stored)
        )
        state["param_state"] = flat_states_to_load(asked.optimizer, saved, key)


def _find_key(manifests: list[str], request: ManifestRequest, checkpoint: Path) -> str | None:
    """Return the key of the manifest of a data-parallel group, None if there is none at all."""
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
