"""Optimizer states that were saved without ``--use-distributed-optimizer``.

They are whole and have the names of parameters, as ``fully_reshardable`` ones do, but for masters,
which have other keys. Megatron's distributed optimizer loads no such checkpoint.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moe_optim.checkpoint.files.torch_dist import TorchDistReader
from moe_optim.errors import LayoutError

_MASTER, _WHOLE_MASTER = "optimizer.state.param.", "optimizer.state.fp32_param."
_TYPE = "distrib_optim_sharding_type"


def declare_reshardable(common: dict[str, Any], stored: TorchDistReader) -> None:
    """Declare such states ``fully_reshardable`` in the metadata of their checkpoint.

    Args:
        common: state that is not sharded; changed.
        stored: opened checkpoint.
    """
    content = common.get("content_metadata")
    if not isinstance(content, dict) or _TYPE in content or not _has_whole_masters(stored):
        return
    content[_TYPE] = "fully_reshardable"
    states = common["optimizer"]  # of one optimizer, or of each of several
    for state in [states] if "optimizer" in states else states.values():
        state["param_state_sharding_type"] = "fully_reshardable"


def request_masters(param_state: Mapping[Any, dict[str, Any]], stored: TorchDistReader) -> None:
    """Request masters under the keys that such a checkpoint has for them.

    Args:
        param_state: number of a parameter -> requests for its master and moments, as
            ``fully_reshardable`` has them; changed.
        stored: opened checkpoint.

    Raises:
        LayoutError: it lacks one, as those of fp32 weights.
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
