"""The amaxes of Transformer Engine's own experts, in checkpoints beside their weights."""

from typing import Any
from weakref import WeakSet

from torch.nn import Module

from moe_optim.config import NATIVE_FORMATS
from moe_optim.errors import ConfigError
from moe_optim.formats import get_format
from moe_optim.megatron.active import installed_config
from moe_optim.megatron.experts.amax import sharded_amax
from moe_optim.megatron.patching.engine import original
from moe_optim.megatron.te.grouped_linears import grouped_linears, recorder_of
from moe_optim.megatron.te.recipe import native_recipe

_TARGET = "megatron.core.transformer.moe.experts:TEGroupedMLP.sharded_state_dict"
_LISTENING: WeakSet[Module] = WeakSet()


def sharded_state_dict(
    self: Any,
    prefix: str = "",
    sharded_offsets: tuple[Any, ...] = (),
    metadata: dict[str, Any] | None = None,
) -> Any:
    """Return Megatron's state of the experts, with their amaxes as portable experts save them.

    Where amaxes are recorded, every layer has entries ``.weight_amax``, NaN where its weights are
    not quantized: keys of all layers may be one tensor. Modules take them when they are loaded. No
    rank communicates.

    Raises:
        ConfigError: ``singleton_local_shards`` with amaxes.
    """
    are_recorded = _are_recorded(self.config)
    if are_recorded and (metadata or {}).get("singleton_local_shards", False):
        raise ConfigError(
            "record_amax: singleton_local_shards: expected one key for all experts, got one key an "
            "expert. Save with Megatron's default metadata."
        )
    state = original(_TARGET)(self, prefix, sharded_offsets, metadata)
    for name, linear in grouped_linears(self) if are_recorded else ():
        groups = linear._pg_collection
        state[f"{prefix}{name}.weight_amax"] = sharded_amax(
            recorder_of(linear),
            f"{prefix}experts.{name}.weight_amax",
            (len(sharded_offsets), groups.ep.rank(), groups.ep.size()),
            sharded_offsets,
            groups,
            num_experts=linear.num_gemms,
        )
        if linear not in _LISTENING:
            linear.register_load_state_dict_pre_hook(_take)
            _LISTENING.add(linear)
    return state


def _are_recorded(model: Any) -> bool:
    config = installed_config()
    if config is None:
        return False
    formats = NATIVE_FORMATS.get(native_recipe(model) or "", ("bf16",))
    config = config.resolved(formats[0])
    if config.format == "bf16":
        return False
    return config.record_amax or get_format(config.format).has_global_amax


def _take(linear: Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    recorder = recorder_of(linear)
    recorder.forget_amax()
    recorder.take_amax(state_dict.pop(f"{prefix}weight_amax", None))
