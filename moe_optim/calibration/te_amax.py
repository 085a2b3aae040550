"""The amaxes of Transformer Engine's own experts, in checkpoints beside their weights."""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

from torch.nn import Module

from moe_optim.errors import refuse
from moe_optim.experts.amax import sharded_amax
from moe_optim.experts.calibrated_amax import calibrated_amax, take_calibrated_amax
from moe_optim.experts.calibrated_entry import calibrated_entry
from moe_optim.experts.keys.layouts import CALIBRATED_AMAX, LINEARS
from moe_optim.experts.te_linears import grouped_linears, recorder_of
from moe_optim.experts.wrapped import unknown_wrapper
from moe_optim.formats import get_format
from moe_optim.integration.engine import original
from moe_optim.integration.installation import installed_config
from moe_optim.rules import NATIVE_FORMATS, native_recipe
from moe_optim.weights.adapters import BASE, base_of, is_wrapper
from moe_optim.weights.names import unwrapped_name

_TARGET = "megatron.core.transformer.moe.experts:TEGroupedMLP.sharded_state_dict"
_RECORDED = "weight_amax"
_LISTENING: WeakSet[Module] = WeakSet()


def sharded_state_dict(
    self: Any,
    prefix: str = "",
    sharded_offsets: tuple[Any, ...] = (),
    metadata: dict[str, Any] | None = None,
) -> Any:
    """Return Megatron's state of the experts, with their amaxes as portable experts save them.

    Where amaxes are recorded, every layer has entries ``.weight_amax``, NaN where its weights are
    not quantized: keys of all layers may be one tensor. Calibrated ones are ``.calibrated_amax``,
    see :func:`calibrated_entry`. Modules take them when they are loaded. No rank communicates.

    Linears behind adapters have their keys, which do not tell of adapters.

    Raises:
        ConfigError: ``singleton_local_shards`` with amaxes.
        StateError: quantized weights are on the host.
        LayoutError: amaxes of a linear that something else is wrapped around.
    """
    are_recorded = _are_recorded(self.config)
    linears = [(unwrapped_name(name), linear) for name, linear in grouped_linears(self)]
    are_calibrated = any(calibrated_amax(linear) is not None for _, linear in linears)
    if are_recorded or are_calibrated:
        _require_known_names(self, linears)
    has_key_each = (metadata or {}).get("singleton_local_shards", False)
    if has_key_each:
        refuse(
            {"record_amax": are_recorded, "calibrated amaxes": are_calibrated},
            expected="singleton_local_shards: expected one key for the amaxes of all experts",
            remedy="Save with Megatron's default metadata.",
        )
    for storage in (one for _, linear in linears for one in recorder_of(linear).storages()):
        storage.require_present()
    state = original(_TARGET)(self, prefix, sharded_offsets, metadata)
    for name, linear in () if has_key_each else linears:
        groups, key = linear._pg_collection, f"{prefix}experts.{name}"
        place = (len(sharded_offsets), groups.ep.rank(), groups.ep.size())
        if are_recorded:
            state[f"{prefix}{name}.{_RECORDED}"] = sharded_amax(
                recorder_of(linear),
                f"{key}.{_RECORDED}",
                place,
                sharded_offsets,
                groups,
                num_experts=linear.num_gemms,
            )
        state[f"{prefix}{name}.{CALIBRATED_AMAX}"] = calibrated_entry(
            linear, key, linear.num_gemms, place, sharded_offsets, groups
        )
    listen(self)
    return state


def listen(module: Module) -> None:
    """Have grouped linears take amaxes that come with their weights, which they do not know.

    Adapters around them pass the amaxes on.

    Args:
        module: with any of them below it.
    """
    wrappers = [one for one in module.modules() if is_wrapper(one)]
    hooks: list[tuple[Module, Callable[..., None]]] = [
        (wrapper, _pass_on) for wrapper in wrappers if _is_grouped(base_of(wrapper))
    ]
    hooks += [(linear, _take) for _, linear in grouped_linears(module)]
    for one, hook in hooks:
        if one not in _LISTENING:
            one.register_load_state_dict_pre_hook(hook)
            _LISTENING.add(one)


def _is_grouped(module: Module) -> bool:
    return any(linear is module for _, linear in grouped_linears(module))


def _require_known_names(experts: Module, linears: Sequence[tuple[str, Any]]) -> None:
    """Refuse to save amaxes under keys that no model without the wrapper would ask for."""
    for name, _ in linears:
        if name not in LINEARS:
            outer = name.partition(".")[0]
            raise unknown_wrapper(f"experts.{outer}", experts.get_submodule(outer))


def _are_recorded(model: Any) -> bool:
    config = installed_config()
    if config is None:
        return False
    formats = NATIVE_FORMATS.get(native_recipe(model) or "", ("bf16",))
    config = config.resolved(formats[0])
    if config.format == "bf16":
        return False
    return config.record_amax or get_format(config.format).has_global_amax


def _pass_on(_wrapper: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for name in (_RECORDED, CALIBRATED_AMAX):
        if f"{prefix}{name}" in state_dict:
            state_dict[f"{prefix}{BASE}.{name}"] = state_dict.pop(f"{prefix}{name}")


def _take(linear: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    recorder = recorder_of(linear)
    recorder.forget_amax()
    recorder.take_amax(state_dict.pop(f"{prefix}{_RECORDED}", None))
    take_calibrated_amax(linear, state_dict, prefix, linear.num_gemms, recorder.name)
