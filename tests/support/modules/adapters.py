"""Adapters around linears of experts: those of Megatron-Bridge, and wrappers of other kinds.

:class:`AdapterWrapper` does what ``megatron.bridge.peft.adapter_wrapper.AdapterWrapper`` and its
``LoRALinear`` do with states and in the forward pass; :class:`Adapter` is one that a rank has for
all of its experts.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module


class Adapter(Module):
    """Two narrow linears; states as ``ParallelLinearAdapter`` has them, with an axis of ranks."""

    def __init__(self, cols: int, rows: int, groups: Any) -> None:
        super().__init__()
        self.linear_in = Linear(cols, 2, bias=False, dtype=torch.bfloat16)
        self.linear_out = Linear(2, rows, bias=False, dtype=torch.bfloat16)
        self.groups = groups

    def forward(self, tokens: Tensor) -> Tensor:
        return self.linear_out(self.linear_in(tokens))

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None) -> dict[str, Any]:
        from megatron.core.dist_checkpointing.mapping import ShardedTensor

        axis = len(sharded_offsets)
        ep = self.groups.ep
        return {
            f"{prefix}{name}": ShardedTensor.from_rank_offsets(
                f"{prefix}{name}",
                values.detach(),
                *sharded_offsets,
                (axis, ep.rank(), ep.size()),
                replica_id=(0, self.groups.expt_tp.rank(), self.groups.expt_dp.rank()),
                prepend_axis_num=axis + 1,
            )
            for name, values in self.named_parameters()
        }


class AdapterWrapper(Module):
    """Megatron-Bridge's: keys of states are the linear's own, the adapter's behind ``adapter.``."""

    def __init__(self, to_wrap: Module, adapter: Module) -> None:
        super().__init__()
        self.to_wrap, self.adapter = to_wrap, adapter

    def forward(self, tokens: Tensor, *args: Any, **kwargs: Any) -> Any:
        output = self.to_wrap(tokens, *args, **kwargs)
        if isinstance(output, tuple):
            return output[0] + self.adapter(tokens), *output[1:]
        return output + self.adapter(tokens)

    def backward_dw(self) -> None:
        """Nothing is delayed."""

    def state_dict(self, destination=None, prefix="", keep_vars=False) -> dict[str, Any]:
        destination = {} if destination is None else destination
        self.to_wrap.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        self.adapter.state_dict(
            destination=destination, prefix=f"{prefix}adapter.", keep_vars=keep_vars
        )
        return destination

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None) -> dict[str, Any]:
        own = self.to_wrap.sharded_state_dict(prefix, sharded_offsets, metadata)
        return own | self.adapter.sharded_state_dict(f"{prefix}adapter.", sharded_offsets, metadata)


class PlainWrapper(Module):
    """An adapter that leaves states to torch, and passes on what it does not know itself."""

    def __init__(self, to_wrap: Module, adapter: Module) -> None:
        super().__init__()
        self.to_wrap, self.adapter = to_wrap, adapter

    def forward(self, tokens: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.to_wrap(tokens, *args, **kwargs) + self.adapter(tokens)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("to_wrap"), name)


class Hiding(Module):
    """A wrapper whose children have other names, so that nobody can tell what they are."""

    def __init__(self, to_wrap: Module, adapter: Module) -> None:
        super().__init__()
        self.inner, self.extra = to_wrap, adapter

    def forward(self, tokens: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.inner(tokens, *args, **kwargs) + self.extra(tokens)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


def wrap(experts: Any, wrapper: type[Module] = AdapterWrapper, *, plain: bool = False) -> Any:
    """Put an adapter around each linear of experts, in place, and freeze their weights.

    Args:
        experts: portable or Transformer Engine's, of the sizes of ``calibrating``.
        wrapper: one of the classes here.
        plain: have adapters that do not say how ranks share them.
    """
    from tests.support.modules.calibrating import LINEARS

    groups = getattr(experts, "pg_collection", None) or experts.linear_fc1._pg_collection
    for parameter in experts.parameters():
        if isinstance(parameter, torch.nn.Parameter):
            parameter.requires_grad_(False)
    for name, (rows, cols) in LINEARS.items():
        adapter: Module = Adapter(cols, rows, groups)
        if plain:
            adapter = Linear(cols, rows, bias=False, dtype=torch.bfloat16)
        setattr(experts, name, wrapper(getattr(experts, name), adapter))
    return experts
