"""Measures the kinds of work of ``python -m benchmarks requantize``, row by row."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from benchmarks.cases import Case, Owned
from benchmarks.timing import host_us, median_ms, nothing, release, temporary_bytes
from benchmarks.traffic import finish_bytes, health_bytes, requantize_bytes
from moe_optim.commands.plan.costs import step_bytes

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from benchmarks.te.cast import MasterCast
    from moe_optim.formats import Direction, QuantizedWeight
    from moe_optim.kernels.member_table import MemberTable, TableEntry

FROM_FP32 = "fp32 to wire planes"
FROM_BF16 = "bf16 to wire planes, source zeroed"
AFTER_GATHER = "after the gather"
STEP = "step to wire planes, {} moments"
NORM = "gradient norm"
HEALTH = "health"
ALONE = ", no all-reduce"
"""Note for work whose maxima span ranks: they are computed and used without an exchange."""

_POISON = 0xA5

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Work of one row, laid out in memory."""

    work: str
    run: Callable[[], object]
    num_members: int
    floor_bytes: Fraction
    launches: int
    restore: Callable[[], object] = nothing
    peer: Callable[[], object] | None = None
    """The same work by Transformer Engine."""
    check: Callable[[], None] = nothing
    """Raises if the peer's bytes differ, after both ran."""


def measure(case: Case, speed: float, group: "ProcessGroup | None") -> Iterator[Row]:
    """Yield a row for each kind of work, freeing its memory before the next.

    ``speed`` is the copy speed in bytes read plus written per ms; ``group`` that of Transformer
    Engine's cast, or None to measure only ours. PatchError, before any timing, if Transformer
    Engine's bytes differ.
    """
    makers: list[Callable[[Case, ProcessGroup | None], Job]] = [_from_fp32, _from_bf16]
    if case.shard == 1 and not case.format.is_row_only:  # ranks derive whole gathered weights
        makers.append(_after_gather)
    makers += [partial(_step, moments="fp32"), partial(_step, moments="bf16"), _norm, _health]
    for make in makers:
        yield measure_job(make(case, group), case, speed)
        release(case.device)


def measure_job(job: Job, case: Owned, speed: float) -> Row:
    """Compile, compare bytes with any peer, then time both alternately."""
    job.run()
    if job.peer is not None:
        job.peer()
        job.check()
    temporary = temporary_bytes(job.run, case.device)
    works = [job.run] if job.peer is None else [job.run, job.peer]
    ms, *te = median_ms(works, case.device, job.restore)
    floor = float(job.floor_bytes) / speed
    te_ms = te[0] if te else None
    return {
        "format": case.name,
        "work": job.work,
        "shape_set": case.label,
        "shard": f"1/{case.shard}",
        "members": job.num_members,
        "parameters": sum(case.owned),
        "ms": round(ms, 4),
        "floor_ms": round(floor, 4),
        "fraction_of_floor": round(floor / ms, 3),
        "te_ms": None if te_ms is None else round(te_ms, 4),
        "te_fraction_of_floor": None if te_ms is None else round(floor / te_ms, 3),
        "host_us": round(host_us(job.run, case.device), 1),
        "temporary_bytes": temporary,
        "launches": job.launches,
    }


def _from_fp32(case: Case, group: "ProcessGroup | None") -> Job:
    import torch

    from moe_optim.kernels.member_table import MemberTable

    entries = lay_out(case, draw(case, torch.float32).split(case.owned))
    job = _requantization(case, MemberTable.build(entries))
    cast = _te_cast(case, entries, group)
    if cast is None:
        return job
    return replace(job, peer=cast.quantize, check=partial(cast.check_bytes, derived=False))


def _from_bf16(case: Case, group: "ProcessGroup | None") -> Job:
    """Zero the source, as if gradients and gathered values shared memory. Without a peer."""
    import torch

    from moe_optim.kernels.member_table import MemberTable

    memory = draw(case, torch.bfloat16)
    job = _requantization(
        case, MemberTable.build(lay_out(case, memory.split(case.owned)), consumed=memory)
    )
    return replace(job, restore=partial(memory.copy_, memory.clone()))


def _requantization(case: Case, table: "MemberTable") -> Job:

    def alone() -> None:
        table.find_maxima.launch()
        table.encode.launch()

    zeroed, shared = table.consumed is not None, table.exchange.numel() > 0
    work = (FROM_BF16 if zeroed else FROM_FP32) + (ALONE if shared else "")
    return Job(
        work=work,
        run=alone if shared else table.launch,
        num_members=table.num_members,
        floor_bytes=requantize_bytes(case.format, sum(case.owned), zeroed=zeroed),
        launches=len(table.find_maxima.kernels) + len(table.encode.kernels),
    )


def _after_gather(case: Case, group: "ProcessGroup | None") -> Job:
    """Start from requantized buffers, which equal gathered ones on a single rank."""
    import torch

    from moe_optim.kernels.member_table import MemberTable

    entries = lay_out(case, draw(case, torch.float32).split(case.owned), stored=True)
    table = MemberTable.build(entries)
    table.launch()
    job = Job(
        work=AFTER_GATHER,
        run=table.finish.launch,
        num_members=table.num_members,
        floor_bytes=Fraction(sum(finish_bytes(case.format, *member) for member in case.members)),
        launches=len(table.finish.kernels),
    )
    cast = _te_cast(case, entries, group) if case.format.is_2d else None
    if cast is None:  # for formats that gather both buffers, it derives nothing
        return job
    cast.quantize()
    return replace(job, peer=cast.finish_gather, check=partial(cast.check_bytes, derived=True))


def _step(case: Case, group: "ProcessGroup | None", moments: Literal["fp32", "bf16"]) -> Job:
    """Lay out gradients and moments beside the masters; steps do not change their own cost."""
    import torch

    from moe_optim.formats.reference.adam import Hyper
    from moe_optim.kernels.adam_state import AdamState
    from moe_optim.kernels.member_table import MemberTable
    from moe_optim.kernels.step_table import StepTable

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[moments]
    masters = draw(case, torch.float32)
    entries = lay_out(case, masters.split(case.owned))
    gradients = masters.mul(0.01).split(case.owned)
    states = [
        AdamState(
            parameter=entry.parameter,
            master=entry.source.view(-1),
            gradient=gradient,
            exp_avg=torch.zeros_like(gradient, dtype=dtype),
            exp_avg_sq=torch.zeros_like(gradient, dtype=dtype),
        )
        for entry, gradient in zip(entries, gradients, strict=True)
    ]
    hyper = Hyper(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=1)
    clips = torch.full((1,), 0.5, dtype=torch.float32, device=case.device)
    members = MemberTable.build(entries)
    table = StepTable.build(
        states,
        torch.tensor([hyper.row()], dtype=torch.float32, device=case.device),
        clips,
        members=members,
    )
    work = STEP.format(moments) + (ALONE if members.exchange.numel() else "")

    def alone() -> None:
        table.launch()
        members.encode_shared.launch()

    job = Job(
        work=work,
        run=alone,
        num_members=members.num_members,
        floor_bytes=step_bytes(
            case.format, sum(case.owned), grad_bytes=4, moment_bytes=2 * dtype.itemsize
        ),
        launches=sum(one.constants["RULE"] != "none" for one in table.update.kernels),
    )
    cast = _te_cast(case, entries, group)
    if cast is None:
        return job
    from benchmarks.te.step import Step

    step = Step(states, hyper, float(clips), cast)
    return replace(job, peer=step.run, check=step.check)


def _norm(case: Case, group: "ProcessGroup | None") -> Job:
    import torch

    from moe_optim.kernels.norm import NormInput, NormTable

    gradients = draw(case, torch.float32).split(case.owned)
    table = NormTable.build([NormInput(gradient) for gradient in gradients])
    job = Job(
        work=NORM,
        run=table.launch,
        num_members=len(gradients),
        floor_bytes=Fraction(4 * sum(case.owned)),
        launches=len(table.kernels),
    )
    if group is None:
        return job
    from benchmarks.te.step import norm_of

    return replace(job, peer=norm_of(gradients))


def _health(case: Case, group: "ProcessGroup | None") -> Job:
    """Sample requantized weights once, as every ``health_interval`` iterations."""
    import torch

    from moe_optim.kernels.health import HealthEntry, HealthTable
    from moe_optim.kernels.member_table import MemberTable

    entries = lay_out(case, draw(case, torch.float32).split(case.owned))
    members = MemberTable.build(entries)
    members.find_maxima.launch()
    members.encode.launch()
    looked_at = [
        HealthEntry(entry=entry, rows=torch.tensor([row], dtype=torch.int64, device="cpu"))
        for row, entry in enumerate(entries)
    ]
    device = entries[0].source.device
    table = HealthTable.build(looked_at, len(entries), device=device)
    return Job(
        work=HEALTH,
        run=table.launch,
        num_members=len(entries),
        floor_bytes=health_bytes(case.format, sum(case.owned)),
        launches=len(table.kernels),
    )


def _te_cast(
    case: Case, entries: "Sequence[TableEntry]", group: "ProcessGroup | None"
) -> "MasterCast | None":
    from benchmarks.te import cast

    if group is None or case.format.name not in cast.FORMATS:
        return None
    return cast.MasterCast(entries, group)


def draw(case: Owned, dtype: "torch.dtype") -> "torch.Tensor":
    """Return random values for all owned elements, expert by expert."""
    import torch

    generator = torch.Generator(case.device).manual_seed(0)
    memory = torch.empty(sum(case.owned), dtype=dtype, device=case.device)
    return memory.normal_(std=0.02, generator=generator)


def lay_out(
    case: Case, sources: "Sequence[torch.Tensor]", *, stored: bool = False
) -> "list[TableEntry]":
    """Return an entry for each expert.

    Buffers are prefilled with bytes that no kernel writes, so that skipped elements never compare
    equal.

    Args:
        case: shapes of the experts.
        sources: [n] owned elements of each expert; fp32 or bf16, on the case's device.
        stored: whether to include the scales in storage.
    """
    import torch

    from moe_optim.formats import QuantizedWeight
    from moe_optim.kernels.member_table import TableEntry

    entries = []
    for index, ((rows, cols), source) in enumerate(zip(case.members, sources, strict=True)):
        shape, is_whole = (1, rows, cols), source.numel() == rows * cols
        target = QuantizedWeight.empty(case.format, shape, device=case.device)
        for buffer in target.buffers().values():
            buffer.view(torch.uint8).fill_(_POISON)
        entries.append(
            TableEntry(
                parameter=f"weight {index}",
                source=source.view(shape) if is_whole else source,
                target=target,
                cuts=() if is_whole else (source.numel(),),
                storage_scales=_storage_scales(target) if stored else {},
            )
        )
    return entries


def _storage_scales(target: "QuantizedWeight") -> "dict[Direction, torch.Tensor]":
    import torch

    from moe_optim.formats import DIRECTIONS

    format, (_, rows, cols) = target.format, target.shape
    return {
        way: torch.zeros(
            (1, *format.storage_scale_shape(rows, cols, way)),
            dtype=format.scale_dtype,
            device=target.rowwise_data.device,
        )
        for way in DIRECTIONS
    }
