"""Hooks into Megatron's checkpointing, state manifests and integrity checks.

Entry points are ``load``, ``save`` and ``integrity``; ``files`` reads checkpoints without Megatron.
Imports experts, weights and ``integration/installation``. Modules that an optimizer calls are
imported when it first saves or loads.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_optim.checkpoint import (
        flat_states,
        model_values,
        owned_boxes,
        param_groups,
        staging,
        state_manifest,
        states_without_manifest,
    )

__all__ = [
    "flat_states",
    "model_values",
    "owned_boxes",
    "param_groups",
    "staging",
    "state_manifest",
    "states_without_manifest",
]


def __getattr__(name: str) -> Any:
    """Import a module of an optimizer's states on first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")
