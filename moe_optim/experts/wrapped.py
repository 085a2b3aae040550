"""Linears of portable experts that something was put in the place of: seen through, or refused."""

from typing import Any

from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.transformer.utils import sharded_state_dict_default
from torch.nn import Module

from moe_optim.errors import LayoutError
from moe_optim.experts.grouped_linear import GroupedLinear
from moe_optim.experts.keys.layouts import LINEARS
from moe_optim.weights.names import ADAPTER, base_of, is_wrapper


def grouped_linear_of(experts: Module, name: str) -> GroupedLinear:
    """Return a linear of portable experts, also where it is behind an adapter.

    Args:
        experts: portable ones.
        name: ``linear_fc1`` or ``linear_fc2``.

    Raises:
        LayoutError: something else stands in its place.
    """
    module: Module = getattr(experts, name)
    base = base_of(module)
    if isinstance(base, GroupedLinear):
        return base
    raise unknown_wrapper(name, module)


def unknown_wrapper(name: str, module: Module) -> LayoutError:
    """Return the error of what is put around a linear of experts and hides it.

    Args:
        name: where it stands, if no linear in it says so.
        module: what stands there.
    """
    inside = (one.name for one in module.modules() if isinstance(one, GroupedLinear))
    return LayoutError(
        f"{next(inside, name)}: expected a linear of experts, or an adapter around one with "
        f"children to_wrap and adapter, as Megatron-Bridge's are, got {type(module).__name__}, in "
        "which its weights would be passed over. Wrap it as Megatron-Bridge does, or not at all."
    )


def adapter_states(
    experts: Any, prefix: str, sharded_offsets: tuple[Any, ...], metadata: dict[str, Any] | None
) -> dict[str, Any]:
    """Return what adapters around linears save, under the keys that Megatron-Bridge gives them.

    Args:
        experts: portable ones.
        prefix: of the experts' names; keys in checkpoints have ``experts.`` behind it.
        sharded_offsets: of the axes before those of parameters.
        metadata: of the checkpoint.

    Raises:
        LayoutError: an adapter does not say how ranks share it, and several do.
    """
    state: dict[str, Any] = {}
    groups = experts.pg_collection
    for name in LINEARS:
        module = getattr(experts, name)
        if not is_wrapper(module):
            continue
        adapter = module.get_submodule(ADAPTER)
        ranks = groups.ep.size() * groups.expt_tp.size()
        if ranks > 1 and not hasattr(adapter, "sharded_state_dict"):
            raise LayoutError(
                f"{grouped_linear_of(experts, name).name}: expected an adapter that has a "
                f"sharded_state_dict(), since {ranks} ranks have experts or parts of their own, "
                f"got {type(adapter).__name__}, of which one rank's would be saved for all. Give "
                "it one, as Megatron-Bridge's adapters have."
            )
        own = sharded_state_dict_default(
            adapter, f"{name}.{ADAPTER}.", sharded_offsets, metadata, tp_group=groups.expt_tp
        )
        replace_prefix_for_sharding(own, f"{name}.", f"{prefix}experts.{name}.")
        state |= {f"{prefix}{key}": value for key, value in own.items()}
    return state
