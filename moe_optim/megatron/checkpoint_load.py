"""Megatron's loading of checkpoints, and what it looks at before: damage, manifests, extras.

Acts only on states in which an optimizer or an expert of this package asks for something.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.validation import StrictHandling

from moe_optim.checkpoints.stored_objects import StoredObjects
from moe_optim.errors import LayoutError, MoEOptimError
from moe_optim.layout.state_manifest import StateManifest
from moe_optim.megatron.optimizer_state import (
    MANIFEST,
    ManifestRequest,
    require_same_interleave,
)

_stock_load = dist_checkpointing.load


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
        LayoutError: flat optimizer states of other experts, or of experts in an unknown order.
    """
    if list(_requests(sharded_state_dict)):
        agree(lambda: _resolve(sharded_state_dict, Path(checkpoint_dir)), process_group)
    return _stock_load(
        sharded_state_dict,
        checkpoint_dir,
        sharded_strategy,
        validate_access_integrity,
        strict,
        verify_integrity,
        process_group,
    )


def agree(act: Callable[[], Any], group: Any) -> Any:
    """Call ``act`` on every rank of ``group``; raise on all of them what one of them raised.

    Otherwise those without an error would wait for the others in the next collective.
    """
    error: MoEOptimError | None = None
    result = None
    try:
        result = act()
    except MoEOptimError as raised:
        error = raised
    errors: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(errors, error, group=group)
    if error is not None:
        raise error
    for rank, other in enumerate(errors):
        if other is not None:
            raise type(other)(f"rank {rank}: {other}")
    return result


def _requests(state: Any) -> Iterator[tuple[dict[Any, Any], ManifestRequest]]:
    """Yield every request for a manifest, with the dict that holds it."""
    if isinstance(state, dict):
        request = state.get(MANIFEST)
        if isinstance(request, ManifestRequest):
            yield state, request
    for value in state.values() if isinstance(state, dict) else state:
        if isinstance(value, dict | list):
            yield from _requests(value)


def _resolve(sharded_state_dict: Any, checkpoint: Path) -> None:
    """Replace every request for a manifest by requests for what the checkpoint holds."""
    stored = StoredObjects.of(checkpoint)
    manifests = [key for key in stored.object_keys() if f".{MANIFEST}." in key]
    for state, request in list(_requests(sharded_state_dict)):
        del state[MANIFEST]
        for key in manifests[:1]:  # all say the same of this
            saved = StateManifest.from_dict(stored.read(key), key)
            require_same_interleave(request.optimizer, saved, str(checkpoint))
        if not request.is_flat:
            continue
        found = None
        if own := _find_key(manifests, request, checkpoint):
            found = own, StateManifest.from_dict(stored.read(own), own)
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
