"""How many tokens each expert of each MoE layer is given, counted where experts run."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_optim.formats.health_figures import ExpertLoad
from moe_optim.health.rows import ExpertName, names_of_all_ranks
from moe_optim.weights.names import modules_by_name, with_global_layers


class _Count:
    """Adds up what one layer's experts are given in passes that gradients come of.

    So evaluations, rollouts and the first of two passes of recomputation do not count. It adds
    where Megatron has the numbers, on the host or on the GPU, and waits for neither.
    """

    def __init__(self, names: list[ExpertName]) -> None:
        self.names = names
        self.tokens: Tensor | None = None
        """[experts here] int64; None before the first pass."""

    def __call__(self, _: torch.nn.Module, given: tuple[Any, ...]) -> None:
        if not torch.is_grad_enabled():
            return
        tokens = given[1]
        if self.tokens is None:
            if tokens.is_cuda and torch.cuda.is_current_stream_capturing():
                return  # a replay would begin at zero again
            self.tokens = torch.zeros(len(self.names), dtype=torch.int64, device=tokens.device)
        self.tokens += tokens


class TokenCounts:
    """The tokens of all experts of all ranks since they were last asked for.

    Args:
        model_chunks: of this rank; their experts get a hook.
    """

    def __init__(self, model_chunks: Iterable[torch.nn.Module]) -> None:
        self._counts = [count for chunk in model_chunks for count in _count_in(chunk)]
        self._sizes = [len(count.names) for count in self._counts]
        self._names: list[ExpertName] = []
        self._rows: Tensor | None = None

    def reduce(self) -> Tensor:
        """Return the tokens of every expert, and begin again. Every rank must call it.

        Returns:
            [experts of all layers] fp64 on the current device, in the order of ``loads_of``.
        """
        device = torch.empty(
            0, dtype=torch.uint8, device=torch.cuda.current_device()
        ).device  # or the CPU runtime's
        if self._rows is None:
            mine = [name for count in self._counts for name in count.names]
            self._names = names_of_all_ranks(mine)
            row_of = {name: row for row, name in enumerate(self._names)}
            rows = [row_of[name] for name in mine]
            self._rows = torch.tensor(rows, dtype=torch.int64, device=device)
        tokens = torch.zeros(len(self._names), dtype=torch.float64, device=device)
        for count, of_count in zip(self._counts, self._rows.split(self._sizes), strict=True):
            if count.tokens is not None:
                tokens[of_count] = count.tokens.to(device, torch.float64, non_blocking=True)
                count.tokens.zero_()
        dist.all_reduce(tokens)
        return tokens

    def loads_of(self, tokens: Tensor) -> tuple[ExpertLoad, ...]:
        """Return the load of each layer that had tokens.

        Args:
            tokens: what ``reduce`` returned, on the CPU; copied.
        """
        rows: dict[str, list[int]] = {}
        for row, name in enumerate(self._names):
            rows.setdefault(name.layer, []).append(row)
        return tuple(
            ExpertLoad(
                layer=layer,
                experts=tuple(self._names[row].expert for row in of_layer),
                tokens=tokens[of_layer].clone(),
            )
            for layer, of_layer in rows.items()
            if tokens[of_layer].any()
        )


def _count_in(chunk: torch.nn.Module) -> Iterable[_Count]:
    """Hook the experts of each MoE layer that this rank counts, and yield what they count with."""
    modules = modules_by_name(chunk)
    for name, module in modules.items():
        if not name.endswith("mlp.experts"):
            continue
        layer = modules[name.removesuffix(".experts")]
        group = getattr(module, "tp_group", None) or module.pg_collection.expt_tp
        if group.rank() == 0:  # all ranks of this group are given the same tokens
            whole = with_global_layers(name, modules).removesuffix(".mlp.experts")
            label = f"{whole.removeprefix('decoder.')}.experts"
            count = _Count([ExpertName(label, one, "") for one in layer.local_expert_indices])
            hooks = module._forward_pre_hooks
            for key in [key for key, hook in hooks.items() if isinstance(hook, _Count)]:
                del hooks[key]  # of an optimizer before
            module.register_forward_pre_hook(count)
            yield count
