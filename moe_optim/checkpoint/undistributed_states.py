"""Optimizer states saved without ``--use-distributed-optimizer``.

They are unsharded and keyed by parameter name like ``fully_reshardable`` ones, except for the keys
of masters. Megatron's distributed optimizer does not load such checkpoints.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moe_optim.checkpoint.files.torch_dist import TorchDistReader
from moe_optim.errors import LayoutError

_MASTER, _WHOLE_MASTER = "optimizer.state.param.", "optimizer.state.fp32_param."
_TYPE = "distrib_optim_sharding_type"


def declare_reshardable(common: dict[str, Any], stored: TorchDistReader) -> None:
    """Declare such states ``fully_reshardable`` in ``common``, the common state of ``stored``."""
    content = common.get("content_metadata")
    if not isinstance(content, dict) or _TYPE in content or not _has_whole_masters(stored):
        return
    content[_TYPE] = "fully_reshardable"
    states = common["optimizer"]  # one optimizer's, or a dict of several
    for state in [states] if "optimizer" in states else states.values():
        state["param_state_sharding_type"] = "fully_reshardable"


def request_masters(param_state: Mapping[Any, dict[str, Any]], stored: TorchDistReader) -> None:
    """Rewrite the keys of master requests in ``param_state`` to those in ``stored``.

    ``param_state`` maps parameter index -> ``fully_reshardable`` requests, and is modified in
    place. LayoutError if the checkpoint lacks a master, as for fp32 weights.
    """
    if not _has_whole_masters(stored):
        return
    for states in param_state.values():
        name = states["param"].key.removeprefix(_MASTER)
        key = f"{_WHOLE_MASTER}{name}"
        if key not in stored.tensors:
            raise LayoutError(
                f"{stored.path}: expected {key}, got none: without --use-distributed-optimizer "
                "Megatron saves masters of bf16 and fp16 weights alone. Load with --no-load-optim."
            )
        states["param"] = replace(states["param"], key=key)


def _has_whole_masters(stored: TorchDistReader) -> bool:
    return any(key.startswith(_WHOLE_MASTER) for key in stored.tensors)
