"""Export of experts to an engine on every rank: quantized, or in bf16 and requantized there.

Experts are distributed over all ranks. An engine is memory for all experts of the model, into which
every exported tensor is copied, as engines do when loading.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.cases import MODELS, ShapeSet
from benchmarks.timing import Mark, release, wait
from moe_optim.experts.grouped_linear import GroupedLinear
from moe_optim.formats import BlockScaledFormat, QuantizedWeight, get_format
from moe_optim.kernels.member_table import MemberTable
from moe_optim.kernels.table_entry import TableEntry
from moe_optim.rollout.conventions import find_convention
from moe_optim.rollout.expert_tensors import export_experts
from moe_optim.rollout.weights import export_weights

AS_THEY_ARE, IN_BF16, QUANTIZED_AGAIN = "as they are", "bf16", "bf16, quantized again"
REPEATS, WARM_UP = 9, 2

Row = dict[str, Any]
Pairs = Iterable[tuple[str, Tensor]]


class ModelOfExperts(torch.nn.Module):
    """This rank's experts of a model, in the module structure of Megatron's MoE layers.

    Args:
        shapes: experts of the whole model, distributed over all ranks.
        format: format of the weights; None for bf16.
        device: device of the weights.
    """

    def __init__(
        self, shapes: ShapeSet, format: BlockScaledFormat | None, device: torch.device
    ) -> None:
        super().__init__()
        alone = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
        groups = SimpleNamespace(ep=dist.group.WORLD, expt_tp=alone, expt_dp=alone)
        ranks = dist.get_world_size()
        layers = torch.nn.ModuleList()
        for _ in range(shapes.layers):
            experts = torch.nn.ModuleDict()
            experts.pg_collection = groups  # type: ignore[assignment]  # a plain attribute
            for number, (count, rows, cols) in enumerate(shapes.weights, 1):
                linear = GroupedLinear(count // ranks, rows, cols, format=format, device=device)
                experts[f"linear_fc{number}"] = linear
            mlp = torch.nn.ModuleDict({"experts": experts})
            layers.append(torch.nn.ModuleDict({"mlp": mlp}))
        self.decoder = torch.nn.ModuleDict({"layers": layers})

    def sharded_state_dict(self) -> dict[str, Any]:
        """Return the non-expert state, which is empty."""
        return {}

    def linears(self) -> Iterator[GroupedLinear]:
        """Yield linears in export order."""
        return (module for module in self.modules() if isinstance(module, GroupedLinear))

    def export(self) -> Pairs:
        """Export all experts; every rank must call it and exhaust the result."""
        return export_weights([self], layout="sequential")


@dataclass(frozen=True, kw_only=True)
class Requantizing:
    """An engine that receives bf16 weights and quantizes each linear once complete."""

    tables: list[MemberTable]
    buffers: list[QuantizedWeight]
    arriving: list[Tensor]
    """Received bf16 weights of each linear [E, R, C], in memory shared by all layers."""

    @classmethod
    def of(
        cls, shapes: ShapeSet, format: BlockScaledFormat, device: torch.device
    ) -> "Requantizing":
        """Allocate an engine for all experts of a model."""
        memory = [
            torch.empty(shape, dtype=torch.bfloat16, device=device) for shape in shapes.weights
        ]
        arriving = memory * shapes.layers
        buffers = [
            QuantizedWeight.empty(format, tuple(one.shape), device=device) for one in arriving
        ]
        tables = [
            MemberTable.build([TableEntry(parameter=f"linear {n}", source=source, target=target)])
            for n, (source, target) in enumerate(zip(arriving, buffers, strict=True))
        ]
        return cls(tables=tables, buffers=buffers, arriving=arriving)

    def load(self, pairs: Pairs, *, quantizes: bool = True) -> None:
        """Receive all experts; requantize them if ``quantizes``."""
        given = iter(pairs)
        for table, values in zip(self.tables, self.arriving, strict=True):
            for place in values:
                place.copy_(next(given)[1])
            if quantizes:
                table.launch()
        assert next(given, None) is None, "an export has more tensors than its model has experts"

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the current tensors of each expert, in export order."""
        for buffers in self.buffers:
            convention = find_convention(buffers.format)
            for (whole,) in export_experts(buffers, convention):
                yield from whole.items()


def measure(model: str, name: str, device: torch.device) -> Iterator[Row]:
    """Yield a row for each kind of export of one format.

    bf16 weights are prepared in advance: their dequantization is not timed.

    Args:
        model: key of ``MODELS``.
        name: name of a format.
        device: device of this rank.
    """
    yield from list(_rows(model, name, device))
    release(device.type)


def _rows(model: str, name: str, device: torch.device) -> Iterator[Row]:
    shapes, format = MODELS[model], get_format(name)
    trained, plain = _make_models(shapes, format, device)
    places = [torch.empty_like(tensor) for _, tensor in trained.export()]
    engine = Requantizing.of(shapes, format, device)

    def take_as_they_are() -> None:
        for (_, tensor), place in zip(trained.export(), places, strict=True):
            place.copy_(tensor)

    ways: dict[str, Callable[[], None]] = {
        AS_THEY_ARE: take_as_they_are,
        IN_BF16: lambda: engine.load(plain.export(), quantizes=False),
        QUANTIZED_AGAIN: lambda: engine.load(plain.export()),
    }
    numel = shapes.layers * sum(e * r * c for e, r, c in shapes.weights)
    least = None
    for way, act in ways.items():
        ms, host_ms = median_ms(act, device)
        least = least or ms
        nbytes = sum(one.nbytes for one in places) if way == AS_THEY_ARE else 2 * numel
        yield {
            "model": f"{model}, {shapes.layers} layers",
            "format": name,
            "way": way,
            "ranks": dist.get_world_size(),
            "parameters": numel,
            "loaded_bytes": nbytes,
            "received_bytes": nbytes - nbytes // dist.get_world_size(),
            "ms": round(ms, 3),
            "host_ms": round(host_ms, 3),
            "ratio": round(ms / least, 3),
            "other_scales": None,
            "other_elements": None,
        } | (_differences(engine, places) if way == QUANTIZED_AGAIN else {})


def median_ms(act: Callable[[], None], device: torch.device) -> tuple[float, float]:
    """Return the median total time and median call time in ms, with all ranks starting together.

    An export waits for other ranks, so that the total includes host time.
    """
    marks, host_ms = [], []
    for _ in range(WARM_UP + REPEATS):
        dist.barrier()
        wait(device.type)
        began, start = time.perf_counter(), Mark(device.type)
        act()
        host_ms.append(1e3 * (time.perf_counter() - began))
        marks.append((start, Mark(device.type)))
        wait(device.type)
    times = [end.ms_since(start) for start, end in marks]
    return statistics.median(times[WARM_UP:]), statistics.median(host_ms[WARM_UP:])


@torch.no_grad()
def _make_models(
    shapes: ShapeSet, format: BlockScaledFormat, device: torch.device
) -> tuple[ModelOfExperts, ModelOfExperts]:
    """Return a model of quantized experts, and one of their values in bf16."""
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    trained, plain = (ModelOfExperts(shapes, one, device) for one in (format, None))
    for quantized, in_bf16 in zip(trained.linears(), plain.linears(), strict=True):
        drawn = torch.empty(quantized.shape, dtype=torch.bfloat16, device=device)
        quantized.load_values(drawn.normal_(std=0.02, generator=generator))
        assert quantized.storage is not None
        in_bf16.load_values(quantized.storage.dequantize())
    return trained, plain


def _differences(engine: Requantizing, trained: list[Tensor]) -> Row:
    """Return the fraction of scales and element bytes of ``engine`` unlike ``trained``."""
    counts: dict[str, list[int]] = {"elements": [0, 0], "scales": [0, 0]}
    for (suffix, again), before in zip(engine.tensors(), trained, strict=True):
        count = counts["scales" if "scale" in suffix else "elements"]
        count[0] += int((_bits(again) != _bits(before)).sum())
        count[1] += before.numel()
    return {f"other_{kind}": round(other / all, 6) for kind, (other, all) in counts.items()}


def _bits(values: Tensor) -> Tensor:
    return values.view(torch.int32 if values.element_size() == 4 else torch.uint8)
