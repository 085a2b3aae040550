"""Adapters around linears of experts: those of Megatron-Bridge, and wrappers of other kinds.

:class:`AdapterWrapper` does what ``megatron.bridge.peft.adapter_wrapper.AdapterWrapper`` and its
``LoRALinear`` do with states and in the forward pass. The adapters of :data:`LORA` have the names,
children, attributes, products and checkpoint keys of Megatron-Bridge's, of 0.6.2 and commit
067f987, which were seen to go the way of ``test_lora.py`` themselves.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Identity, Linear, Module, Parameter
from torch.nn.functional import linear


class Matrix(Module):
    """One matrix for all experts, or one for each; drawn for all experts of the layer alike."""

    def __init__(self, shape: tuple[int, int], count: int | None, groups: Any, seed: int) -> None:
        super().__init__()
        ep = groups.ep
        whole = () if count is None else (count * ep.size(),)
        values = torch.randn(*whole, *shape, generator=torch.Generator().manual_seed(seed)) / 4
        if count is not None:
            values = values.chunk(ep.size())[ep.rank()]
        self.weight = Parameter(values.bfloat16())
        self.weight.allreduce = ep.size() == 1  # type: ignore[attr-defined]
        if count is None and ep.size() > 1:  # DDP reduces over ranks with the same experts alone
            self.weight.register_hook(partial(_sum_over, ep))

    def forward(self, tokens: Tensor, splits: list[int]) -> Tensor:
        if self.weight.dim() == 2:
            return linear(tokens, self.weight)
        parts = zip(tokens.split(splits), self.weight, strict=True)
        return torch.cat([linear(part, matrix) for part, matrix in parts])


def _sum_over(group: Any, gradient: Tensor) -> Tensor:
    torch.distributed.all_reduce(gradient, group=group)
    return gradient


class Adapter(Module):
    """LoRA; ``PER_EXPERT`` tells which matrices of fc1, and of fc2, are of one expert each."""

    PER_EXPERT = {"linear_fc1": (False, False), "linear_fc2": (False, False)}

    def __init__(self, name: str, shape: tuple[int, int], experts: int, groups: Any) -> None:
        super().__init__()
        self.dim, self.alpha, self.experts, self.groups = 4, 6, experts, groups
        self.activation, (rows, cols) = Identity(), shape
        first, second = (experts if one else None for one in self.PER_EXPERT[name])
        self.linear_in = Matrix((self.dim, cols), first, groups, seed=len(name))
        self.linear_out = Matrix((rows, self.dim), second, groups, seed=rows)

    def forward(self, tokens: Tensor, *args: Any, m_splits: Any = None) -> Tensor:
        splits = [int(count) for count in (args[0] if m_splits is None else m_splits)]
        hidden = self.linear_in(tokens, splits)
        return self.linear_out(hidden, splits) * (self.alpha / self.dim)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None) -> dict[str, Any]:
        """Return an entry of all experts for each matrix; that of all experts counts for each."""
        return {
            f"{prefix}{name}": self._sharded(f"{prefix}{name}", values, sharded_offsets)
            for name, values in self.named_parameters()
        }

    def _sharded(self, key: str, values: Any, sharded_offsets: tuple[Any, ...]) -> Any:
        from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

        axis, ep, experts = len(sharded_offsets), self.groups.ep, self.experts
        replica_id = (0, self.groups.expt_tp.rank(), self.groups.expt_dp.rank())

        def build(key: str, tensor: Tensor, replica_id: Any, _flat: Any = None) -> list[Any]:
            members = tensor.unbind(0) if tensor.dim() == 3 else [tensor] * experts
            first, count = ep.rank() * experts, ep.size() * experts
            return [
                ShardedTensor.from_rank_offsets(
                    key,
                    member,
                    *sharded_offsets,
                    (axis, first + index, count),
                    replica_id=replica_id,
                    prepend_axis_num=axis + 1,
                )
                for index, member in enumerate(members)
            ]

        def merge(members: list[Tensor]) -> Tensor:
            return torch.stack(members) if values.dim() == 3 else members[0]

        return ShardedTensorFactory(key, values, build, merge, replica_id)


class ParallelLinearAdapter(Adapter):
    """Both matrices are of all experts."""


class GroupedExpertLinearAdapter(Adapter):
    """Both matrices are of one expert each."""

    PER_EXPERT = {"linear_fc1": (True, True), "linear_fc2": (True, True)}


class SharedOuterGroupedExpertAdapter(Adapter):
    """The outer matrix, which the hidden size is a side of, is of all experts."""

    PER_EXPERT = {"linear_fc1": (False, True), "linear_fc2": (True, False)}


LORA = [ParallelLinearAdapter, GroupedExpertLinearAdapter, SharedOuterGroupedExpertAdapter]


class AdapterWrapper(Module):
    """Megatron-Bridge's: keys of states are the linear's own, the adapter's behind ``adapter.``."""

    def __init__(self, to_wrap: Module, adapter: Module) -> None:
        super().__init__()
        self.to_wrap, self.adapter = to_wrap, adapter

    def forward(self, tokens: Tensor, *args: Any, **kwargs: Any) -> Any:
        output = self.to_wrap(tokens, *args, **kwargs)
        assert isinstance(output, tuple)
        return output[0] + self.adapter(tokens, *args, **kwargs), *output[1:]

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

    NAMES = "to_wrap", "adapter"

    def __init__(self, to_wrap: Module, adapter: Module) -> None:
        super().__init__()
        for name, child in zip(self.NAMES, (to_wrap, adapter), strict=True):
            self.add_module(name, child)

    def forward(self, tokens: Tensor, *args: Any, **kwargs: Any) -> Any:
        base, extra = self._modules.values()
        output, bias = base(tokens, *args, **kwargs)
        return output + extra(tokens, *args, **kwargs), bias

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__(self.NAMES[0]), name)


class Hiding(PlainWrapper):
    """A wrapper whose children have other names, so that nobody can tell what they are."""

    NAMES = "inner", "extra"


def wrap(
    experts: Any,
    wrapper: type[Module] = AdapterWrapper,
    *,
    adapter: type[Adapter] = ParallelLinearAdapter,
    plain: bool = False,
) -> Any:
    """Put an adapter around each linear of experts, in place, and freeze their weights.

    Args:
        experts: portable or Transformer Engine's.
        wrapper: one of the classes here.
        adapter: one of :data:`LORA`.
        plain: have adapters that do not say how ranks share them.
    """
    groups = getattr(experts, "pg_collection", None) or experts.linear_fc1._pg_collection
    for parameter in experts.parameters():
        if isinstance(parameter, torch.nn.Parameter):
            parameter.requires_grad_(False)
    for name in ("linear_fc1", "linear_fc2"):
        base = getattr(experts, name)
        rows, cols = (next(iter(base._parameters.values()))).shape[-2:]
        one: Module = adapter(name, (rows, cols), base.num_gemms, groups)
        if plain:
            one = Linear(cols, rows, bias=False, dtype=torch.bfloat16)
        setattr(experts, name, wrapper(base, one))
    return experts
