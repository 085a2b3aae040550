"""Token counts per expert and MoE layer, collected by forward pre-hooks."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_optim.formats.health_figures import ExpertLoad
from moe_optim.health.rows import ExpertName, ExpertRows
from moe_optim.places import this_device
from moe_optim.weights.names import modules_by_name, with_global_layers


class _Count:
    """Pre-hook that counts the tokens of one layer's experts in passes with gradients.

    Evaluations, rollouts and the first of two recomputation passes do not count. Additions run on
    the device of Megatron's counts, without synchronization.
    """

    def __init__(self, names: list[ExpertName]) -> None:
        self.names = names
        self.tokens: Tensor | None = None
        """[local experts] int64; None before the first pass."""

    def __call__(self, _: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        if not torch.is_grad_enabled():
            return
        tokens = inputs[1]
        if self.tokens is None:
            if tokens.is_cuda and torch.cuda.is_current_stream_capturing():
                return  # a replay would reset it
            self.tokens = torch.zeros(len(self.names), dtype=torch.int64, device=tokens.device)
        self.tokens += tokens


class TokenCounts:
    """Token counts of all experts of all ranks since the last :meth:`reduce`."""

    def __init__(self, model_chunks: Iterable[torch.nn.Module]) -> None:
        self._counts = [count for chunk in model_chunks for count in _count_in(chunk)]
        self._all: ExpertRows | None = None
        self._rows: tuple[Tensor, ...] = ()

    def reduce(self) -> Tensor:
        """Return the token count of every expert, and reset it. Every rank must call it.

        It is fp64 on the current device, in the order of :meth:`loads_of`.
        """
        device = this_device()
        if self._all is None:
            self._all = ExpertRows.of_all_ranks(
                name for count in self._counts for name in count.names
            )
            self._rows = tuple(self._all.of(count.names).to(device) for count in self._counts)
        tokens = torch.zeros(len(self._all.names), dtype=torch.float64, device=device)
        for count, rows in zip(self._counts, self._rows, strict=True):
            if count.tokens is not None:
                tokens[rows] = count.tokens.to(device, torch.float64, non_blocking=True)
                count.tokens.zero_()
        dist.all_reduce(tokens)
        return tokens

    def loads_of(self, tokens: Tensor) -> tuple[ExpertLoad, ...]:
        """Return the load of each layer with tokens, from a CPU copy of :meth:`reduce`'s result."""
        if self._all is None:
            return ()
        rows = self._all.by_layer(torch.ones_like(tokens, dtype=torch.bool))
        return tuple(
            ExpertLoad(
                layer=layer,
                experts=tuple(self._all.names[row].expert for row in of_layer),
                tokens=tokens[of_layer].clone(),
            )
            for (layer, _), of_layer in rows.items()
            if tokens[of_layer].any()
        )


def _count_in(chunk: torch.nn.Module) -> Iterable[_Count]:
    modules = modules_by_name(chunk)
    for name, module in modules.items():
        if not name.endswith("mlp.experts"):
            continue
        layer = modules[name.removesuffix(".experts")]
        group = getattr(module, "tp_group", None) or module.pg_collection.expt_tp
        if group.rank() == 0:  # this group's ranks get the same tokens
            whole = with_global_layers(name, modules).removesuffix(".mlp.experts")
            label = f"{whole.removeprefix('decoder.')}.experts"
            count = _Count([ExpertName(label, one, "") for one in layer.local_expert_indices])
            hooks = module._forward_pre_hooks
            for key in [key for key, hook in hooks.items() if isinstance(hook, _Count)]:
                del hooks[key]  # of an earlier optimizer
            module.register_forward_pre_hook(count)
            yield count
