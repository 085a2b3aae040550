"""Export of experts to an engine on every rank: quantized, or in bf16 and requantized there.

Experts are distributed over all ranks. An engine is memory for all experts of the model, into which
every exported tensor is copied, as engines do when loading: one of all experts of a linear, or one
per expert.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.cases import MODELS, ShapeSet
from benchmarks.timing import Mark, release, wait
from moe_optim.experts.grouped_linear import GroupedLinear
from moe_optim.formats import BlockScaledFormat, QuantizedWeight, get_format
from moe_optim.kernels.member_table import MemberTable
from moe_optim.kernels.table_entry import TableEntry
from moe_optim.rollout.conventions import find_convention
from moe_optim.rollout.expert_tensors import RowSplit, rowwise_of, stack_experts
from moe_optim.rollout.weights import export_weights

AS_THEY_ARE, IN_BF16, QUANTIZED_AGAIN = "as they are", "bf16", "bf16, quantized again"
STACKED, ONE_EACH = "stacked", "one each"
LAYOUTS: dict[str, Any] = {STACKED: "grouped", ONE_EACH: "sequential"}
"""Layouts of ``export_weights``: one tensor [E, R, C] per linear, or one per expert."""
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

    def export(self, tensors: str) -> Pairs:
        """Export all experts; every rank must call it and exhaust the result."""
        return export_weights([self], layout=LAYOUTS[tensors])


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

    def load(self, pairs: Pairs) -> None:
        """Receive stacked experts, and quantize each linear."""
        for table, values, (_, tensor) in zip(self.tables, self.arriving, pairs, strict=True):
            values.copy_(tensor)
            table.launch()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield suffix and stacked tensor of each linear, in export order."""
        for held in self.buffers:
            convention = find_convention(held.format)
            (whole,) = stack_experts(rowwise_of(held), held.format.name, convention, RowSplit())
            yield from whole.items()


def measure(model: str, name: str, device: torch.device) -> Iterator[Row]:
    """Yield a row for each kind of export of one format, stacked and one tensor per expert.

    Host times are of exports that nobody loads. bf16 weights are prepared in advance: their
    dequantization is not timed.

    Args:
        model: key of ``MODELS``.
        name: name of a format.
        device: device of this rank.
    """
    yield from list(_rows(model, name, device))
    release(device.type)


@dataclass(frozen=True, kw_only=True)
class Way:
    """A kind of export, and what loads it."""

    name: str
    tensors: str
    source: ModelOfExperts
    load: Callable[[Pairs], None]

    def export(self) -> Pairs:
        """Export all experts."""
        return self.source.export(self.tensors)

    def act(self) -> None:
        """Export and load all experts."""
        self.load(self.export())

    def exhaust(self) -> None:
        """Export all experts for nobody."""
        deque(self.export(), maxlen=0)

    def count(self, linears: int) -> Row:
        """Return tensors, and collectives that send them, per linear of all ranks."""
        pairs, calls = self.export(), Collectives()
        with calls:
            count = sum(1 for _ in pairs)
        return {
            "tensors_per_linear": count / linears,
            "transfers_per_linear": calls.count / linears,
        }


def _rows(model: str, name: str, device: torch.device) -> Iterator[Row]:
    shapes, format = MODELS[model], get_format(name)
    trained, plain = _make_models(shapes, format, device)
    engine = Requantizing.of(shapes, format, device)
    stacked = {key: torch.empty_like(tensor) for key, tensor in trained.export(STACKED)}
    numel = shapes.layers * sum(e * r * c for e, r, c in shapes.weights)
    exact = sum(one.nbytes for one in stacked.values())
    of_bf16: dict[str, float] = {}
    for way in _ways(trained, plain, engine, stacked):
        ms, _ = median_ms(way.act, device)
        _, host_ms = median_ms(way.exhaust, device)
        nbytes = exact if way.name == AS_THEY_ARE else 2 * numel
        yield {
            "model": f"{model}, {shapes.layers} layers",
            "format": name,
            "way": way.name,
            "tensors": way.tensors,
            "ranks": dist.get_world_size(),
            "parameters": numel,
            "loaded_bytes": nbytes,
            "received_bytes": nbytes - nbytes // dist.get_world_size(),
            "ms": round(ms, 3),
            "host_ms": round(host_ms, 3),
            "of_bf16": round(ms / of_bf16.setdefault(way.tensors, ms), 3),
            **way.count(len(engine.buffers)),
            "other_scales": None,
            "other_elements": None,
        } | (_differences(engine, list(stacked.values())) if way.load == engine.load else {})


def _ways(
    trained: ModelOfExperts,
    plain: ModelOfExperts,
    engine: Requantizing,
    stacked: Mapping[str, Tensor],
) -> Iterator[Way]:
    """Yield all ways, bf16 first; quantized tensors are loaded into ``stacked``."""
    in_bf16 = dict(zip(_keys(plain, STACKED), engine.arriving, strict=True))
    yield Way(name=IN_BF16, tensors=STACKED, source=plain, load=partial(_load, in_bf16))
    yield Way(name=AS_THEY_ARE, tensors=STACKED, source=trained, load=partial(_load, stacked))
    yield Way(name=QUANTIZED_AGAIN, tensors=STACKED, source=plain, load=engine.load)
    for name, source, places in ((IN_BF16, plain, in_bf16), (AS_THEY_ARE, trained, stacked)):
        of_each = _of_each(places, _keys(source, ONE_EACH))
        yield Way(name=name, tensors=ONE_EACH, source=source, load=partial(_load, of_each))


def _load(places: Mapping[str, Tensor], pairs: Pairs) -> None:
    """Copy every tensor to its place, as an engine does."""
    for name, tensor in pairs:
        places[name].copy_(tensor)


def _keys(model: ModelOfExperts, tensors: str) -> list[str]:
    return [name for name, _ in model.export(tensors)]


def _of_each(stacked: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """Return the places of experts with these names, within those of stacked ones."""
    found = {}
    for name in names:
        container, _, rest = name.partition("local_experts.")
        expert, _, suffix = rest.partition(".")
        found[name] = stacked[container + suffix][int(expert)]
    return found


class Collectives(TorchDispatchMode):
    """Counts the collectives that are called while it is entered."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.namespace == "c10d"
        return func(*args, **(kwargs or {}))


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
