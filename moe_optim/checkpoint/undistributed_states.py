"""Optimizer states that Megatron saves whole: without ``--use-distributed-optimizer``, or of Muon.

They are keyed by parameter name like ``fully_reshardable`` ones, except for the keys of masters,
and for the number of their optimizer where ``dp_reshardable`` is the sharding type:

    optimizer.state.fp32_param.NAME
    chained_0.optimizer.state.momentum_buffer.NAME

Muon's layer-wise optimizer steps the matrices. Where it lays out buffers, the other parameters have
a distributed optimizer, whose states are flat beside them. Megatron's distributed optimizer loads
none of these checkpoints.
"""

import re
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import nested_values

from moe_optim.checkpoint.files.torch_dist import TorchDistReader
from moe_optim.checkpoint.flat_buffers import flat_groups
from moe_optim.checkpoint.state_kinds import (
    BY_NAME,
    BY_NAME_KEY,
    MASTER,
    SHARDING_TYPE,
    WHOLE_MASTER,
    state_kinds,
)
from moe_optim.errors import LayoutError, listed

_GROUPS = r"chained_{}\.optimizer\.distributed\.dp_group_idx_\d+\.optimizer/.*"
_STATE_TYPE = "param_state_sharding_type"


def declare_reshardable(common: dict[str, Any], stored: TorchDistReader) -> None:
    """Declare such states ``fully_reshardable`` in ``common``, the common state of ``stored``.

    Adds parameter groups of a distributed optimizer beside a layer-wise one, saved as objects.
    """
    content = common.get("content_metadata")
    if not isinstance(content, dict) or not _has_whole_masters(stored):
        return
    content[SHARDING_TYPE] = BY_NAME
    states = common["optimizer"]  # one optimizer's, or a dict of several
    for number, state in [(0, states)] if "optimizer" in states else states.items():
        state[_STATE_TYPE] = BY_NAME
        if "optimizer" not in state:
            pattern = re.compile(_GROUPS.format(number))
            groups = next((key for key in stored.objects if pattern.fullmatch(key)), None)
            if groups is not None:  # the same in all data-parallel groups
                state["optimizer"] = stored.read_object(groups)


def request_whole_states(param_state: Any, stored: TorchDistReader) -> None:
    """Rewrite the keys of ``fully_reshardable`` requests, in place, to those in ``stored``.

    LayoutError if the checkpoint lacks a master, as for fp32 weights.
    """
    if not _has_whole_masters(stored):
        return
    found = {_address(key): key for key in stored.tensors if BY_NAME_KEY.fullmatch(key)}
    for request in _requests(param_state):
        kind, name = _address(request.key)
        if (kind, name) not in found and kind == MASTER:
            raise LayoutError(
                f"{stored.path}: expected optimizer.state.{WHOLE_MASTER}.{name}, got none: "
                "without --use-distributed-optimizer Megatron saves masters of bf16 and fp16 "
                "weights alone. Load with --no-load-optim."
            )
        request.key = found.get((kind, name), request.key)


def require_same_states(param_state: Any, stored: TorchDistReader) -> None:
    """Raise LayoutError if ``stored`` lacks a requested state, or has it in another shape."""
    faults = set()
    for request in _requests(param_state):
        info = stored.tensors.get(request.key)
        if info is None:
            faults.add(f"{request.key} is missing")
        elif info.shape != tuple(request.global_shape) and not request.allow_shape_mismatch:
            shapes = f"{list(info.shape)}, expected {list(request.global_shape)}"
            faults.add(f"{request.key} is {shapes}")
    if faults:
        raise LayoutError(
            f"{stored.path}: expected the optimizer states of this model, got others: "
            f"{listed(sorted(faults))}. Start with the model that the checkpoint was saved from, "
            "or take the weights alone (--no-load-optim)."
        )


def _requests(param_state: Any) -> list[Any]:
    return [entry for entry in nested_values(param_state) if hasattr(entry, "global_shape")]


def flat_group_beside(stored: TorchDistReader, group_key: str) -> str | None:
    """Return the key prefix of flat states beside whole ones, None if there are none.

    Args:
        stored: checkpoint.
        group_key: prefix without the number of an optimizer, as by name; returned as it is for a
            data-parallel group that the checkpoint lacks.
    """
    groups = flat_groups(stored) if _has_whole_masters(stored) else []
    alike = (group for group in groups if group.endswith(f".{group_key}"))
    return next(alike, group_key) if groups else None


def _address(key: str) -> tuple[str, str]:
    """Return kind of state and parameter name of a key, the same for both names of masters."""
    match = BY_NAME_KEY.fullmatch(key)
    assert match is not None
    return MASTER if match["kind"] == WHOLE_MASTER else match["kind"], match["name"]


def _has_whole_masters(stored: TorchDistReader) -> bool:
    return WHOLE_MASTER in state_kinds(stored.tensors)
