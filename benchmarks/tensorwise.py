"""Measures casts to FP8 with per-tensor scaling, and the transposes after a gather."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

from benchmarks.cases import OneScaleCase
from benchmarks.requantize import AFTER_GATHER, Job, Row, draw, measure_job
from benchmarks.timing import release
from benchmarks.traffic import tensorwise_bytes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

CAST = "fp32 to codes and scales"

_POISON = 0xA5


def measure(case: OneScaleCase, speed: float, group: "ProcessGroup | None") -> Iterator[Row]:
    """Yield a row for the cast and, on a GPU, one for transposes.

    Arguments and errors are as in ``requantize.measure``.
    """
    makers: list[Callable[[OneScaleCase, ProcessGroup | None], Job]] = [_cast]
    if case.shard == 1 and case.device == "cuda":  # no CPU kernel
        makers.append(_transposes)
    for make in makers:
        yield measure_job(make(case, group), case, speed)
        release(case.device)


def _cast(case: OneScaleCase, group: "ProcessGroup | None") -> Job:
    """Cast shards without waiting for the amaxes of other ranks."""
    import torch

    from moe_optim.kernels.tensorwise import ScaledWeight, TensorwiseTable

    masters = draw(case, torch.float32).split(case.owned)
    codes = torch.full((sum(case.owned),), _POISON, dtype=torch.uint8, device=case.device)
    scales = torch.full((len(masters),), torch.nan, dtype=torch.float32, device=case.device)
    weights = [
        ScaledWeight(master=master, data=data, scale_inv=scale)
        for master, data, scale in zip(
            masters, codes.split(case.owned), scales.split(1), strict=True
        )
    ]
    table = TensorwiseTable.build(weights)

    def run() -> None:
        table.find_amaxes.launch()
        table.launch()

    job = Job(
        work=CAST,
        run=run,
        num_members=len(weights),
        floor_bytes=Fraction(tensorwise_bytes(sum(case.owned))),
        launches=len(table.find_amaxes.kernels) + len(table.kernels),
    )
    if group is None:
        return job
    from benchmarks.te.tensorwise import Cast

    peer = Cast(case.members, masters, group)
    return replace(job, peer=peer.quantize, check=lambda: peer.check(weights))


def _transposes(case: OneScaleCase, group: "ProcessGroup | None") -> Job:
    """Transpose whole weights, as Hopper's GEMMs require."""
    import torch

    from moe_optim.kernels.member_table import plan_transposes

    codes = torch.randint(0, 256, (sum(case.owned),), dtype=torch.uint8, device=case.device)
    sources = [
        one.view(shape) for one, shape in zip(codes.split(case.owned), case.members, strict=True)
    ]
    copies = [torch.empty_like(source.t().contiguous()) for source in sources]
    job = Job(
        work=AFTER_GATHER,
        run=plan_transposes([*zip(sources, copies, strict=True)]).launch,
        num_members=len(sources),
        floor_bytes=Fraction(2 * sum(case.owned)),
        launches=1,
    )
    if group is None:
        return job
    from benchmarks.te.tensorwise import Transposes

    peer = Transposes(sources)
    return replace(job, peer=peer.write, check=lambda: peer.check(copies))
