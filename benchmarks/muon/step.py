"""Measures whole Muon steps of experts and their parts, beside stock's one matrix at a time."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from benchmarks.muon.cases import (
    LEARNING_RATE,
    MOMENTUM,
    PLUGIN,
    STOCK,
    WEIGHT_DECAY,
    Experts,
    Iteration,
    Row,
    draw,
    fewest_operations,
    plain_operations,
    settings_of,
)
from benchmarks.muon.floors import Machine, momentum_bytes, pack_bytes, update_bytes
from benchmarks.timing import host_us, median_ms, median_part_ms, release

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from moe_optim.formats import BlockScaledFormat
    from moe_optim.kernels.member_table import TableEntry
    from moe_optim.kernels.plan import Plan
    from moe_optim.optimizer.muon import MatrixWeight, MuonSettings
    from moe_optim.optimizer.muon_step import MuonState, MuonTable

WHOLE = "whole step"
STOCK_STEP, STOCK_CAST = "step, one matrix at a time", "cast of the masters"
MOMENTUM_PART, PACK, ITERATION, UNPACK, UPDATE = PARTS = (
    "momentum",
    "pack",
    "iteration",
    "unpack",
    "update and encoding",
)
"""Parts of a fused step in their order."""

Recorded = list[tuple[str, "Plan"]]


# Inputs


@dataclass(frozen=True, kw_only=True, slots=True)
class States:
    """Flat tensors of fc1 and fc2 of all experts, fp32 [n] each."""

    masters: tuple["torch.Tensor", ...]
    gradients: tuple["torch.Tensor", ...]
    momenta: tuple["torch.Tensor", ...]

    @classmethod
    def draw(cls, experts: Experts, device: str) -> "States":
        """Draw normal masters and gradients; momenta are equal to gradients."""
        sizes = [experts.count * prod(shape) for shape in experts.shapes]
        masters = draw(sum(sizes), device, std=0.02, seed=1).split(sizes)
        gradients = draw(sum(sizes), device, seed=2)
        return cls(
            masters=masters,
            gradients=gradients.split(sizes),
            momenta=gradients.clone().split(sizes),
        )

    def copy(self) -> "States":
        """Return copies of masters and momenta, and the same gradients."""
        return States(
            masters=tuple(one.clone() for one in self.masters),
            gradients=self.gradients,
            momenta=tuple(one.clone() for one in self.momenta),
        )


def measure(
    experts: Experts,
    formats: Sequence[str],
    iteration: Iteration,
    on: Machine,
    group: "ProcessGroup | None",
) -> Iterator[Row]:
    """Yield rows of stock's step, with its cast per supported format, and of ours.

    Gate and up are matrices of their own on both sides. ``group`` is a process group of this rank,
    over which Transformer Engine casts; None leaves its casts out. Where stock has no cast, our
    whole step is compared with its step alone.
    """
    stock_ms = {}
    for row in _stock_rows(experts, formats, on, group):
        stock_ms[row.work, row.format] = row.ms
        yield row
    release(on.device)
    for name in formats:
        of_stock = stock_ms.get((WHOLE, name), stock_ms[STOCK_STEP, None])
        assert of_stock is not None
        yield from _plugin_rows(experts, name, iteration, on, of_stock)
        release(on.device)


# Stock


def stock_step(experts: Experts, states: States, *, apart: bool = True) -> Callable[[], object]:
    """Return the step of emerging-optimizers' ``Muon`` of every matrix as one parameter."""
    import torch
    from emerging_optimizers.orthogonalized_optimizers import Muon

    how = settings_of("auto", apart=apart).orthogonalization
    params = []
    momenta = []
    for index, (_, rows, cols) in enumerate(experts.batches(apart=apart)):
        held = (states.masters[index], states.gradients[index], states.momenta[index])
        for master, gradient, momentum in zip(
            *(one.view(-1, rows, cols) for one in held), strict=True
        ):
            param = torch.nn.Parameter(master)
            param.grad = gradient
            params.append(param)
            momenta.append(momentum)
    options: Any = {"coefficient_type": how.coefficient_type, "scale_mode": how.scale_mode}
    optimizer = Muon(
        params,
        lr=LEARNING_RATE,
        momentum=MOMENTUM,
        weight_decay=WEIGHT_DECAY,
        nesterov=False,
        fp32_matmul_prec=how.precision,
        num_ns_steps=how.num_steps,
        **options,
    )
    for param, momentum in zip(params, momenta, strict=True):
        optimizer.state[param]["momentum_buffer"] = momentum
    return optimizer.step


def _stock_rows(
    experts: Experts, formats: Sequence[str], on: Machine, group: "ProcessGroup | None"
) -> Iterator[Row]:
    states = States.draw(experts, on.device)
    step = stock_step(experts, states)

    def row(work: str, format: str | None, run: Callable[[], object]) -> Row:
        (ms,) = median_ms([run], on.device, repeats=on.repeats)
        return Row(
            case="step",
            work=work,
            way=STOCK,
            format=format,
            matrices=experts.matrices(apart=True),
            parameters=experts.parameters,
            ms=round(ms, 4),
            host_ms=round(host_us(run, on.device, repeats=on.repeats) / 1e3, 4),
        )

    yield row(STOCK_STEP, None, step)
    for name in formats:
        cast = _stock_cast(experts, states, name, group)
        if cast is None:
            continue

        def step_and_cast(cast: Callable[[], object] = cast) -> None:
            step()
            cast()

        yield row(STOCK_CAST, name, cast)
        yield row(WHOLE, name, step_and_cast)
        release(on.device)


def _stock_cast(
    experts: Experts, states: States, name: str, group: "ProcessGroup | None"
) -> Callable[[], object] | None:
    """Return stock's cast of the masters of all experts; None if it has none."""
    import torch

    from benchmarks.te import cast
    from moe_optim.formats import get_format

    if name == "bf16":
        masters = [
            master
            for held, shape in zip(states.masters, experts.shapes, strict=True)
            for master in held.view(-1, *shape)
        ]
        weights = [torch.empty_like(master, dtype=torch.bfloat16) for master in masters]
        return lambda: torch._foreach_copy_(weights, masters)
    if group is None or name not in cast.FORMATS:
        return None
    entries = [
        _entry(get_format(name), master, (1, *shape))
        for held, shape in zip(states.masters, experts.shapes, strict=True)
        for master in held.view(-1, prod(shape))
    ]
    return cast.MasterCast(entries, group).quantize


# The plug-in


def _entry(
    format: "BlockScaledFormat", master: "torch.Tensor", shape: tuple[int, int, int]
) -> "TableEntry":
    from moe_optim.formats import QuantizedWeight
    from moe_optim.kernels.member_table import TableEntry

    return TableEntry(
        parameter="weight",
        source=master.view(shape),
        target=QuantizedWeight.empty(format, shape, device=master.device),
        cuts=(),
        storage_scales={},
    )


@contextmanager
def recorded_plans() -> Iterator[Recorded]:
    """Record the plans of each part of all :class:`MuonTable` built in the block."""
    from moe_optim.kernels.momentum import Momentum
    from moe_optim.kernels.newton_schulz import NewtonSchulz
    from moe_optim.kernels.update import Updates

    recorded: Recorded = []

    def recording(part: str, build: Callable[..., "Plan"]) -> Callable[..., "Plan"]:
        def build_and_record(*args: Any, **kwargs: Any) -> "Plan":
            plan = build(*args, **kwargs)
            recorded.append((part, plan))
            return plan

        return build_and_record

    with ExitStack() as stack:
        for part, planner, name in (
            (PACK, Momentum, "plan_pack"),
            (UNPACK, Momentum, "plan_unpack"),
            (UPDATE, Updates, "plan_along"),
        ):
            wrapped = recording(part, getattr(planner, name))
            stack.enter_context(patch.object(planner, name, wrapped))
        iterating = staticmethod(recording(ITERATION, NewtonSchulz.build))
        stack.enter_context(patch.object(NewtonSchulz, "build", iterating))
        yield recorded


def parts_of(table: "MuonTable", recorded: Recorded) -> list[tuple[str, "Plan"]]:
    """Return the parts of a table in the order of a launch.

    Every call is in one part; those of a chunk that no recorded plan has scale what is unpacked.
    """
    from moe_optim.kernels.plan import Plan

    names = {id(call): part for part, plan in recorded for call in plan.calls}
    parts: list[tuple[str, Plan]] = [(MOMENTUM_PART, table.momentum)]
    for chunk in table.chunks:
        for part, calls in groupby(chunk.calls, lambda call: names.get(id(call), UNPACK)):
            parts.append((part, Plan(device=table.device, calls=tuple(calls))))
    if table.updates.finish.calls:
        parts.append((UPDATE, table.updates.finish))
    return parts


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedStep:
    """Fused step of some experts."""

    table: "MuonTable"
    parts: list[tuple[str, "Plan"]]
    held: tuple[object, ...]
    """States and members, of whose tensors the table has the addresses alone."""

    @classmethod
    def build(
        cls,
        weights: Sequence["MatrixWeight"],
        states: States,
        settings: "MuonSettings",
        format: "BlockScaledFormat | None",
    ) -> "FusedStep":
        """Plan the step of weights, one parameter per tensor of ``states``; None is bf16."""
        import torch

        from moe_optim.kernels.member_table import MemberTable
        from moe_optim.optimizer.muon_step import MuonTable, common_scale_of, needed_bytes

        device = states.masters[0].device
        scales = [common_scale_of(weight, settings) for weight in weights]
        distinct = list(dict.fromkeys(scales))
        groups = [distinct.index(scale) for scale in scales]
        of_table = list(_muon_states(weights, states, groups, copied=format is None))
        members = []
        if format is not None:
            entries = [
                _entry(format, one.master, (one.count, *one.matrix.shape)) for one in of_table
            ]
            members.append(MemberTable.build(entries))
        nbytes = needed_bytes([(one.matrix, one.count) for one in of_table], settings)
        with recorded_plans() as recorded:
            table = MuonTable.build(
                of_table,
                settings,
                _hyper(distinct, device),
                torch.ones(1, dtype=torch.float32, device=device),
                torch.empty(nbytes, dtype=torch.uint8, device=device),
                members=members,
            )
        return cls(table=table, parts=parts_of(table, recorded), held=(*of_table, *members))

    @property
    def num_launches(self) -> int:
        """Number of calls of a step."""
        return sum(len(plan.calls) for _, plan in self.parts)


def _muon_states(
    weights: Sequence["MatrixWeight"], states: States, groups: Sequence[int], *, copied: bool
) -> "Iterator[MuonState]":
    import torch

    from moe_optim.optimizer.muon_step import MuonState

    for weight, group, master, gradient, momentum in zip(
        weights, groups, states.masters, states.gradients, states.momenta, strict=True
    ):
        yield MuonState(
            parameter=weight.name,
            matrix=weight,
            master=master,
            gradient=gradient,
            momentum=momentum,
            group=group,
            norm=0,
            weight=torch.empty_like(master, dtype=torch.bfloat16) if copied else None,
        )


def _hyper(scales: Sequence[float], device: "torch.device") -> "torch.Tensor":
    """Return hyperparameters with one row per scale, as the distributed optimizer fills them."""
    import torch

    from moe_optim.kernels.fields import HYPER_FIELDS
    from moe_optim.optimizer.muon import hyper_of

    group = {"lr": LEARNING_RATE, "momentum": MOMENTUM, "weight_decay": WEIGHT_DECAY}
    rows = [hyper_of(group, scale, 1.0).row() for scale in scales]
    filled = [row + [0.0] * (HYPER_FIELDS - len(row)) for row in rows]
    return torch.tensor(filled, dtype=torch.float32, device=device)


def _plugin_rows(
    experts: Experts, name: str, iteration: Iteration, on: Machine, stock_ms: float
) -> Iterator[Row]:
    """Yield the whole step in one format, and its parts as timed within whole steps."""
    from moe_optim.formats import FORMATS
    from moe_optim.formats.reference.newton_schulz import matmul_precision

    format, settings = FORMATS.get(name), settings_of(iteration, apart=True)
    states = States.draw(experts, on.device)
    step = FusedStep.build(experts.weights(apart=True), states, settings, format)
    launch = step.table.launch
    (ms,) = median_ms([launch], on.device, repeats=on.repeats)
    with matmul_precision(step.table.precision):
        launches = [(part, plan.launch) for part, plan in step.parts]
        parts = median_part_ms(launches, on.device, on.repeats)
    floors = _floors(experts, format, iteration, on)
    whole = _plugin_row(experts, name, WHOLE, ms, sum(floors.values()))
    yield replace(
        whole,
        host_ms=round(host_us(launch, on.device, repeats=on.repeats) / 1e3, 4),
        of_stock=round(ms / stock_ms, 4),
        launches=step.num_launches,
        chunks=len(step.table.chunks),
    )
    operations = plain_operations(experts.batches(apart=True), settings.orthogonalization.num_steps)
    for part in (one for one in PARTS if one in parts):
        row = _plugin_row(experts, name, part, parts[part], floors.get(part))
        rate = round(operations / parts[part] / 1e9, 2)
        yield replace(row, tflop_per_s=rate) if part == ITERATION else row


def _plugin_row(experts: Experts, name: str, work: str, ms: float, floor: float | None) -> Row:
    return Row(
        case="step",
        work=work,
        way=PLUGIN,
        format=name,
        matrices=experts.matrices(apart=True),
        parameters=experts.parameters,
        ms=round(ms, 4),
        floor_ms=None if floor is None else round(floor, 4),
        of_floor=None if floor is None else round(floor / ms, 3),
    )


def _floors(
    experts: Experts, format: "BlockScaledFormat | None", iteration: Iteration, on: Machine
) -> dict[str, float]:
    """Return the lower bound of each part in ms; unpacking is a part that need not be."""
    numel, batches = experts.parameters, experts.batches(apart=True)
    steps = settings_of(iteration, apart=True).orthogonalization.num_steps
    return {
        MOMENTUM_PART: momentum_bytes(numel) / on.bytes_per_ms,
        PACK: pack_bytes(numel) / on.bytes_per_ms,
        ITERATION: fewest_operations(batches, steps, iteration) / on.operations_per_ms,
        UPDATE: float(update_bytes(format, numel)) / on.bytes_per_ms,
    }
