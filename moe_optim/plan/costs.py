"""What expert weights cost a rank, counted on the layouts that a run would use.

Everything is exact and follows from shapes: planes from ``plan_wire``, buckets from Megatron's own
layout, maxima from ``plan_exchange``, what a fused step moves from ``layout/traffic.py``, which
benchmarks hold its launches against. Not counted are the tables that kernels read (addresses,
tiles, slots of their own) and what an allocator rounds up.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_optim.config import MoEOptimConfig
from moe_optim.formats import DIRECTIONS, FORMATS, MXFP8, BlockScaledFormat
from moe_optim.kernels.exchange import plan_exchange
from moe_optim.layout.census import count_bands, count_owned
from moe_optim.layout.traffic import norm_bytes, step_bytes
from moe_optim.layout.wire import Slot, plan_wire
from moe_optim.megatron.optimizer.fused import settings_of_stocks_step
from moe_optim.megatron.planning import PlannedBucket, PlannedExperts

STOCK_MXFP8, STOCK_BF16 = "stock mxfp8", "stock bf16"
"""Megatron's own: MXFP8 weights whose gather passes through the gradient memory in bf16, and bf16
weights in a parameter buffer."""

PLANES = tuple(f"{way}_{kind}" for way in DIRECTIONS for kind in ("data", "scale"))
PARTS = (
    *(*PLANES, "global_amax", "parameter_buffer", "exchange"),
    *("gradients", "masters", "moments"),
)
"""What a rank's bytes consist of. The first five are fields of ``QuantizedWeight``, the buffer is
that of bf16 weights, and the exchange holds the maxima that ranks reduce."""

STEP_FIGURES = (
    *("norm_bytes_per_rank", "update_bytes_per_rank"),
    *("step_bytes_per_parameter", "step_floor_ms"),
)
"""What a row says of a fused step."""

Row = dict[str, Any]


class Costs(NamedTuple):
    """One bucket, or all buckets of a rank."""

    parts: Mapping[str, int]
    """Bytes by name, some of :data:`PARTS`; masters and moments are left to :attr:`owned`."""
    gathered: int
    """Bytes a rank holds of what travels, its own part among them, once all of it has arrived."""
    maxima: int
    """fp32 values that ranks reduce with MAX before they encode; each rank holds them all."""
    cuts_bands: bool
    numel: int
    """Elements, padding included."""
    owned: Tensor
    """[dp_size] int64: elements of weights that each rank has the masters of."""
    launches: Tensor
    """[dp_size] int64: kernels that quantize, find maxima, or derive planes."""


def why_stocks_step(experts: PlannedExperts, knobs: MoEOptimConfig) -> str | None:
    """Return what makes steps stock's, on GPUs where kernels run, or None where they are fused."""
    if not knobs.may_fuse_steps:
        asked = {name: getattr(knobs, name) for name in ("step", "layout", "backend")}
        return ", ".join(f"{k}: {v}" for k, v in asked.items() if v in ("stock", "reference"))
    # Adam holds masters where no weight is quantized, and such rows are stock's.
    settings = settings_of_stocks_step(experts, masters_of_adam=False)
    return next((setting for setting, there in settings.items() if there), None)


def plan_rows(
    experts: PlannedExperts,
    gpus: Sequence[int],
    *,
    is_fused: bool = True,
    tb_per_s: float | None = None,
) -> Iterator[Row]:
    """Yield a row for every format, and two for Megatron's own, at each number of GPUs.

    ``resident_bytes_per_rank`` is that of the rank with most masters: planes (those that are
    gathered are the storage), exchanged maxima, gradients in their own dtype, fp32 masters and two
    moments.
    ``gathered_bytes_per_step`` counts all planes of all buckets after the gather, the rank's own
    slice included. ``launches_per_step`` is that of the rank with most, without copies and fills.
    ``norm_bytes_per_rank`` and ``update_bytes_per_rank`` are what a fused step of the experts has
    to read and write on the rank with most masters, each value once; ``step_bytes_per_parameter``
    is that of the update, and ``step_floor_ms`` the time of both at the speed of memory. None
    where no fused step is taken. ``padding_fraction`` is the part of all buckets that holds no
    weight, and ``shard_imbalance`` the largest number of elements that a rank owns over the mean.

    Args:
        experts: one pipeline stage.
        gpus: how many there are in all.
        is_fused: whether steps of quantized weights are, see :func:`why_stocks_step`.
        tb_per_s: bytes that memory reads and writes, in terabytes a second; None gives no times.

    Raises:
        ConfigError: a number of GPUs that cannot be cut as the flags say.
        LayoutError: a weight that a format cannot hold.
    """
    for count in gpus:
        buckets = experts.buckets(count)
        used = sum(bucket.used * number for bucket, number in buckets.items())
        for name in (*FORMATS, STOCK_MXFP8, STOCK_BF16):
            all_costs = [
                (_costs_of(name, bucket, experts.grad_dtype), number)
                for bucket, number in buckets.items()
            ]
            total = _total(all_costs)
            yield {
                "format": name,
                "gpus": count,
                **_summary(
                    total,
                    used,
                    is_quantized_first=name in FORMATS,
                    moment_bytes=experts.moment_bytes,
                ),
                **_step(FORMATS.get(name) if is_fused else None, total, experts, tb_per_s),
                "expert_data_parallel_size": experts.expert_dp_size(count),
                "buckets": buckets.total(),
            }


def _summary(total: Costs, used: int, *, is_quantized_first: bool, moment_bytes: int) -> Row:
    most = int(total.owned.max())
    parts = {**dict.fromkeys(PARTS, 0), **total.parts} | {
        "masters": 4 * most,
        "moments": moment_bytes * most,
    }
    path = "bf16 wire"
    if is_quantized_first:
        path = "partial amax" if total.cuts_bands else "aligned"
    return {
        "resident_bytes_per_rank": sum(parts.values()),
        "gathered_bytes_per_step": total.gathered,
        "launches_per_step": int(total.launches.max()),
        "padding_fraction": (total.numel - used) / total.numel,
        "path": path,
        "shard_imbalance": most * len(total.owned) / used,
        "exchanged_maxima": total.maxima,
        "parts": parts,
    }


def _step(
    format: BlockScaledFormat | None,
    total: Costs,
    experts: PlannedExperts,
    tb_per_s: float | None,
) -> Row:
    """Return what a fused step moves on the rank with most masters; None of any other step."""
    if format is None:
        return dict.fromkeys(STEP_FIGURES)
    most, grad_bytes = int(total.owned.max()), experts.grad_dtype.itemsize
    norm = norm_bytes(most, grad_bytes=grad_bytes)
    update = step_bytes(format, most, grad_bytes=grad_bytes, moment_bytes=experts.moment_bytes)
    floor_ms = None if tb_per_s is None else float(norm + update) / (tb_per_s * 1e9)
    figures = norm, round(update), float(update / most), floor_ms
    return dict(zip(STEP_FIGURES, figures, strict=True))


def _costs_of(name: str, bucket: PlannedBucket, grad_dtype: torch.dtype) -> Costs:
    if name in FORMATS:
        return _quantized_costs(FORMATS[name], bucket, grad_dtype)
    return _stock_costs(name, bucket, grad_dtype)


def _quantized_costs(
    format: BlockScaledFormat, bucket: PlannedBucket, grad_dtype: torch.dtype
) -> Costs:
    """Count ``wire: quantized`` with ``layout: aligned``."""
    slots, dp_size = bucket.slots, bucket.dp_size
    for slot in slots:
        format.check_shape(slot.shape, slot.name)
    numel = bucket.aligned_end(format).numel
    planes = plan_wire(format, slots, numel, dp_size)
    travelling = {plane.name: plane.nbytes for plane in planes}
    bands = count_bands(format, slots, numel, dp_size)
    owned = count_owned(slots, numel, dp_size)
    exchanges = [
        plan_exchange(format, slot.shape, slot.cuts(numel // dp_size), name=slot.name)
        for slot in slots
    ]
    # As LaunchTable.num_launches and FinishTable: amaxes of experts, whole bands, cut ones twice.
    launches = (bands.whole > 0).long() + 2 * bands.has_cut.long() + int(format.is_2d)
    if format.has_global_amax:
        launches += (owned > 0).long()
    maxima = sum(exchange.size for exchange in exchanges)
    return Costs(
        parts={
            **_derived_bytes(format, slots),
            **travelling,
            "exchange": maxima * torch.float32.itemsize,
            "gradients": numel * grad_dtype.itemsize,
        },
        gathered=sum(travelling.values()),
        maxima=maxima,
        cuts_bands=bool(bands.has_cut.any()),
        numel=numel,
        owned=owned,
        launches=launches,
    )


def _derived_bytes(format: BlockScaledFormat, slots: Sequence[Slot]) -> dict[str, int]:
    """Return the bytes of the planes that do not travel."""
    if not format.is_2d:
        return {}
    shapes = [slot.shape for slot in slots]
    scales = sum(prod(format.scale_shape(shape, "columnwise")) for shape in shapes)
    derived = {"columnwise_scale": scales * format.scale_dtype.itemsize}
    if format.columnwise_copy == "transposed":
        derived["columnwise_data"] = sum(
            prod(format.data_shape(shape, "columnwise")) for shape in shapes
        )
    return derived


def _stock_costs(name: str, bucket: PlannedBucket, grad_dtype: torch.dtype) -> Costs:
    """Count Megatron's distributed optimizer, without this package.

    MXFP8 weights lie in Transformer Engine's storage, padded scales and all, and each expert is
    quantized by itself after the gather; the gather has the memory of the gradients, as with
    ``--reuse-grad-buf-for-mxfp8-param-ag``.
    """
    numel, dp_size = bucket.stock_numel, bucket.dp_size
    wire = numel * torch.bfloat16.itemsize
    launches = 0
    parts = {"parameter_buffer": wire}
    if name == STOCK_MXFP8:
        parts = dict.fromkeys(PLANES, 0)
        for experts, rows, cols in (slot.shape for slot in bucket.slots):
            launches += experts
            for way in DIRECTIONS:
                parts[f"{way}_data"] += experts * rows * cols
                scales = prod(MXFP8.storage_scale_shape(rows, cols, way))
                parts[f"{way}_scale"] += experts * scales
    return Costs(
        parts={**parts, "gradients": numel * grad_dtype.itemsize},
        gathered=wire,
        maxima=0,
        cuts_bands=False,
        numel=numel,
        owned=count_owned(bucket.slots, numel, dp_size),
        launches=torch.full((dp_size,), launches, dtype=torch.int64, device="cpu"),
    )


def _total(costs: Sequence[tuple[Costs, int]]) -> Costs:
    """Return the costs of all buckets, given those of each kind and how many are of it."""
    parts: Counter[str] = Counter()
    for one, number in costs:
        for name, count in one.parts.items():
            parts[name] += count * number
    return Costs(
        parts=parts,
        gathered=sum(one.gathered * number for one, number in costs),
        maxima=sum(one.maxima * number for one, number in costs),
        cuts_bands=any(one.cuts_bands for one, _ in costs),
        numel=sum(one.numel * number for one, number in costs),
        owned=torch.stack([one.owned * number for one, number in costs]).sum(0),
        launches=torch.stack([one.launches * number for one, number in costs]).sum(0),
    )
