"""What expert weights cost a rank, counted on the layouts that a run would use.

Everything is exact and follows from shapes: buffers from ``plan_buffers``, buckets from Megatron's
own layout, maxima from ``plan_exchange``, what a fused step moves from ``layout/traffic.py``, which
benchmarks hold its launches against. Not counted are the tables that kernels read (addresses,
tiles, slots of their own), what an allocator rounds up, and what Megatron's own casts allocate
while they run.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from moe_optim.buckets.buffer_plan import Slot, plan_buffers
from moe_optim.buckets.stock_layout import packed_nbytes
from moe_optim.commands.plan.census import Counts, count_block_rows, count_owned
from moe_optim.commands.plan.experts import PlannedBucket, PlannedExperts
from moe_optim.commands.plan.traffic import norm_bytes, step_bytes
from moe_optim.formats import DIRECTIONS, FORMATS, BlockScaledFormat, Direction
from moe_optim.kernels.exchange import plan_exchange
from moe_optim.rules import offload_fraction

_BF16 = 2  # bytes
STOCK_BF16, STOCK_MXFP8, STOCK_NVFP4, STOCK_FP8_BLOCK = STOCKS = (
    "stock bf16",
    "stock mxfp8",
    "stock nvfp4",
    "stock fp8_block",
)
"""Megatron's own: bf16 weights in a parameter buffer, trained without FP8; MXFP8 weights whose
gather passes through the gradient memory in bf16; FP8 blocks and NVFP4, whose rowwise data lies in
a parameter buffer."""
ROWS = (*FORMATS, *STOCKS)
"""What a plan has a row of, for each number of GPUs."""

BUFFERS = tuple(f"{way}_{kind}" for way in DIRECTIONS for kind in ("data", "scale"))
WEIGHTS = (*BUFFERS, "global_amax", "storage_scales", "parameter_buffer", "exchange")
OPTIMIZER = ("masters", "moments")
PARTS = (*WEIGHTS, "gradients", *OPTIMIZER, "gradient_copies")
"""What a rank's bytes consist of. The first five are fields of ``QuantizedWeight``; storage scales
are those that Transformer Engine's products read, padded and repeated; the buffer is Megatron's;
the exchange holds the maxima that ranks reduce; copies of gradients are made by a step."""

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
    cuts_block_rows: bool
    numel: int
    """Elements, padding included."""
    owned: Counts
    """[dp_size] int64: elements of weights that each rank has the masters of."""
    launches: Counts | None
    """[dp_size] int64: kernels that quantize, find maxima, or derive buffers; None: not counted."""


def plan_rows(
    experts: PlannedExperts,
    gpus: Sequence[int],
    *,
    is_fused: bool = True,
    offload_states: float = 0.0,
    memory_tb_per_s: float | None = None,
    network_gb_per_s: float | None = None,
) -> Iterator[Row]:
    """Yield a row for every format, and those of Megatron's own, at each number of GPUs.

    Bytes are of the rank with most masters. ``weight_bytes_per_rank`` has the buffers (those that
    are gathered are the storage) and exchanged maxima, ``gradient_bytes_per_rank`` gradients in
    their own dtype, ``optimizer_bytes_per_rank`` masters, in fp32 but for stock bf16 with a
    precision-aware optimizer, and two moments, and
    ``step_memory_bytes_per_rank`` copies of gradients: in fp32, made of bf16 ones by Megatron's
    step and not by a fused one. ``total_bytes_per_rank`` is the sum; ``against_stock_bf16_bytes``
    and ``against_stock_bytes`` are it less that of stock, in bf16 and in the same format, where
    stock has it.
    ``gathered_bytes_per_step`` counts all buffers of all buckets after the gather, the rank's own
    slice included, and ``gather_ms`` is how long that takes at the bus bandwidth of collectives.
    ``launches_per_step`` is that of the rank with most, without copies and fills.
    ``norm_bytes_per_rank`` and ``update_bytes_per_rank`` are what a fused step of the experts has
    to read and write on the rank with most masters, each value once; ``step_bytes_per_parameter``
    is that of the update, and ``step_floor_ms`` the time of both at the speed of memory. None
    where no fused step is taken. ``padding_fraction`` is the part of all buckets that holds no
    weight, and ``shard_imbalance`` the largest number of elements that a rank owns over the mean.

    Args:
        experts: one pipeline stage.
        gpus: how many there are in all.
        is_fused: whether steps of quantized weights are fused.
        offload_states: part of their masters and moments that is on the host. The chunks of it that
            pass through the device are not counted, nor is the time that their copies take.
        memory_tb_per_s: terabytes that memory reads and writes in a second; None gives no times.
        network_gb_per_s: gigabytes a second of an all-gather, as its bus bandwidth; likewise.

    Raises:
        ConfigError: a number of GPUs that cannot be cut as the flags say.
        LayoutError: a weight that a format cannot hold.
    """
    for count in gpus:
        buckets = experts.buckets(count)
        used = sum(bucket.used * number for bucket, number in buckets.items())
        dp_size = experts.expert_dp_size(count)
        rows = {}
        for name in ROWS:
            total = _total([(_costs_of(name, one, experts), n) for one, n in buckets.items()])
            format = FORMATS.get(name)
            stock_on_host = offload_fraction(experts) if name == STOCK_BF16 else 0.0
            on_host = offload_states if name in FORMATS else stock_on_host
            rows[name] = {
                "format": name,
                "gpus": count,
                **_memory(
                    total,
                    experts,
                    master_bytes=_master_bytes(name, experts),
                    copies_gradients=_copies_gradients(name, experts, is_fused=is_fused),
                    on_host=on_host,
                ),
                **_traffic(total, used, dp_size, network_gb_per_s),
                "path": _path_of(name, total),
                **_step(
                    format if is_fused else None,
                    total,
                    experts,
                    None if on_host else memory_tb_per_s,
                ),
                "expert_data_parallel_size": dp_size,
                "buckets": buckets.total(),
            }
        totals = {name: row["total_bytes_per_rank"] for name, row in rows.items()}
        for name, row in rows.items():
            stock = totals.get(f"stock {name}")
            row["against_stock_bf16_bytes"] = totals[name] - totals[STOCK_BF16]
            row["against_stock_bytes"] = None if stock is None else totals[name] - stock
            yield row


def _copies_gradients(name: str, experts: PlannedExperts, *, is_fused: bool) -> bool:
    """Return whether a step has gradients in fp32 beside those in the buffer.

    As ``_copy_model_grads_to_main_grads``: of bf16 weights a precision-aware Adam reads bf16.
    """
    if name in FORMATS:
        return experts.grad_bytes < 4 and not is_fused
    return experts.grad_bytes < 4 and not (name == STOCK_BF16 and experts.precision_aware)


def _master_bytes(name: str, experts: PlannedExperts) -> int:
    """Return what a master takes.

    Of bf16 weights a precision-aware Adam keeps 2 bytes: what fp32 has beyond bf16
    (``store_param_remainders``), or fp16 where ``--main-params-dtype`` says so. Quantized weights
    are made of fp32, and ``--optimizer-cpu-offload`` has another Adam, with masters in fp32.
    """
    halves = experts.precision_aware and not experts.optimizer_cpu_offload
    return 2 if name == STOCK_BF16 and halves else 4


def _memory(
    total: Costs,
    experts: PlannedExperts,
    *,
    master_bytes: int,
    copies_gradients: bool,
    on_host: float,
) -> Row:
    """Return what lies in the memory of the rank with most masters."""
    most = int(total.owned.max())
    here = most - int(on_host * most)
    parts = {**dict.fromkeys(PARTS, 0), **total.parts} | {
        "masters": master_bytes * here,
        "moments": experts.moment_bytes * here,
        "gradient_copies": 4 * most * copies_gradients,
    }
    return {
        "weight_bytes_per_rank": sum(parts[name] for name in WEIGHTS),
        "gradient_bytes_per_rank": parts["gradients"],
        "optimizer_bytes_per_rank": sum(parts[name] for name in OPTIMIZER),
        "step_memory_bytes_per_rank": parts["gradient_copies"],
        "total_bytes_per_rank": sum(parts.values()),
        "parts": parts,
    }


def _traffic(total: Costs, used: int, dp_size: int, network_gb_per_s: float | None) -> Row:
    """Return what travels and is launched.

    An all-gather over n ranks takes (n - 1) / n of its bytes at its bus bandwidth.
    """
    gather_ms = None
    if network_gb_per_s is not None:
        gather_ms = total.gathered * (dp_size - 1) / dp_size / (network_gb_per_s * 1e6)
    launches = None if total.launches is None else int(total.launches.max())
    return {
        "gathered_bytes_per_step": total.gathered,
        "gather_ms": gather_ms,
        "launches_per_step": launches,
        "padding_fraction": (total.numel - used) / total.numel,
        "shard_imbalance": int(total.owned.max()) * len(total.owned) / used,
        "exchanged_maxima": total.maxima,
    }


def _path_of(name: str, total: Costs) -> str:
    """Say how weights get to other ranks."""
    if name in FORMATS:
        return "partial amax" if total.cuts_block_rows else "aligned"
    return "bf16 wire" if name in (STOCK_BF16, STOCK_MXFP8) else "by weight"


def _step(
    format: BlockScaledFormat | None,
    total: Costs,
    experts: PlannedExperts,
    tb_per_s: float | None,
) -> Row:
    """Return what a fused step moves on the rank with most masters; None of any other step."""
    if format is None:
        return dict.fromkeys(STEP_FIGURES)
    most, grad_bytes = int(total.owned.max()), experts.grad_bytes
    norm = norm_bytes(most, grad_bytes=grad_bytes)
    update = step_bytes(format, most, grad_bytes=grad_bytes, moment_bytes=experts.moment_bytes)
    floor_ms = None if tb_per_s is None else float(norm + update) / (tb_per_s * 1e9)
    figures = norm, round(update), float(update / most), floor_ms
    return dict(zip(STEP_FIGURES, figures, strict=True))


def _costs_of(name: str, bucket: PlannedBucket, experts: PlannedExperts) -> Costs:
    if name in FORMATS:
        return _quantized_costs(FORMATS[name], bucket, experts)
    return _stock_costs(FORMATS.get(name.removeprefix("stock ")), bucket, experts.grad_bytes)


def _quantized_costs(
    format: BlockScaledFormat, bucket: PlannedBucket, experts: PlannedExperts
) -> Costs:
    """Count ``wire: quantized`` with ``layout: aligned``."""
    slots, dp_size = bucket.slots, bucket.dp_size
    for slot in slots:
        format.check_shape(slot.shape, slot.name)
    numel = bucket.aligned_end(format).numel
    buffers = plan_buffers(format, slots, numel, dp_size)
    travelling = {buffer.name: buffer.nbytes for buffer in buffers}
    block_rows = count_block_rows(format, slots, numel, dp_size)
    owned = count_owned(slots, numel, dp_size)
    exchanges = [
        plan_exchange(format, slot.shape, slot.cuts(numel // dp_size), name=slot.name)
        for slot in slots
    ]
    derives = format.is_2d or experts.in_te
    # As LaunchTable.num_launches and FinishTable: amaxes, whole block rows, cut ones twice.
    launches = (block_rows.whole > 0).astype(np.int64) + 2 * block_rows.has_cut + int(derives)
    if format.has_global_amax:
        launches += owned > 0
    maxima = sum(exchange.size for exchange in exchanges)
    return Costs(
        parts={
            **_derived_bytes(format, slots, in_te=experts.in_te),
            **travelling,
            "exchange": 4 * maxima,
            "gradients": numel * experts.grad_bytes,
        },
        gathered=sum(travelling.values()),
        maxima=maxima,
        cuts_block_rows=bool(block_rows.has_cut.any()),
        numel=numel,
        owned=owned,
        launches=launches,
    )


def _derived_bytes(
    format: BlockScaledFormat, slots: Sequence[Slot], *, in_te: bool
) -> dict[str, int]:
    """Return the bytes of what does not travel.

    Transformer Engine's weights have padded scales besides the buffers, and of columnwise scales
    that follow from rowwise ones no others.
    """
    shapes = [slot.shape for slot in slots]
    derived = {}
    if format.columnwise_copy == "transposed":
        derived["columnwise_data"] = _data_bytes(format, slots)
    if in_te:
        derived["storage_scales"] = sum(_storage_scale_bytes(format, slots).values())
    elif format.is_2d:
        scales = sum(prod(format.scale_shape(shape, "columnwise")) for shape in shapes)
        derived["columnwise_scale"] = scales * format.scale_itemsize
    return derived


def _data_bytes(format: BlockScaledFormat, slots: Sequence[Slot]) -> int:
    """Return the bytes of the data of one direction."""
    return sum(prod(format.data_shape(slot.shape, "rowwise")) for slot in slots)


def _storage_scale_bytes(format: BlockScaledFormat, slots: Sequence[Slot]) -> dict[Direction, int]:
    """Return the bytes of the padded scales of each direction."""
    scales = dict.fromkeys(DIRECTIONS, 0)
    for experts, rows, cols in (slot.shape for slot in slots):
        for way in DIRECTIONS:
            entries = experts * prod(format.storage_scale_shape(rows, cols, way))
            scales[way] += entries * format.scale_itemsize
    return scales


def _stock_costs(format: BlockScaledFormat | None, bucket: PlannedBucket, grad_bytes: int) -> Costs:
    """Count Megatron's distributed optimizer, without this package; bf16 where there is no format.

    Quantized weights lie in Transformer Engine's storage, padded scales and all. Those of MXFP8
    are quantized after the gather, each expert by itself; the gather has the memory of the
    gradients, as with ``--reuse-grad-buf-for-mxfp8-param-ag``. Others are quantized before it, and
    their rowwise data is the parameter buffer; what is launched for that is not counted.
    """
    slots, numel, dp_size = bucket.slots, bucket.stock_numel, bucket.dp_size
    experts = sum(slot.shape[0] for slot in slots)
    wire, parts, launches = _BF16 * numel, {"parameter_buffer": _BF16 * numel}, 0
    if format is not None:
        scales = _storage_scale_bytes(format, slots)
        parts = {f"{way}_scale": nbytes for way, nbytes in scales.items()}
        parts["columnwise_data"] = _data_bytes(format, slots)
    if format is not None and format.columnwise_copy == "quantized":
        parts["rowwise_data"] = _data_bytes(format, slots)
        launches = experts
    elif format is not None:
        wire = packed_nbytes(slots, format.elements_per_byte, bucket.divisor)
        parts["parameter_buffer"] = wire
        parts["global_amax"] = 2 * 4 * experts * format.has_global_amax
    counted = format is None or format.columnwise_copy == "quantized"
    return Costs(
        parts={**parts, "gradients": numel * grad_bytes},
        gathered=wire,
        maxima=0,
        cuts_block_rows=False,
        numel=numel,
        owned=count_owned(slots, numel, dp_size),
        launches=np.full(dp_size, launches, dtype=np.int64) if counted else None,
    )


def _total(costs: Sequence[tuple[Costs, int]]) -> Costs:
    """Return the costs of all buckets, given those of each kind and how many are of it."""
    parts: Counter[str] = Counter()
    for one, number in costs:
        for name, count in one.parts.items():
            parts[name] += count * number
    launches = [one.launches * number for one, number in costs if one.launches is not None]
    return Costs(
        parts=parts,
        gathered=sum(one.gathered * number for one, number in costs),
        maxima=sum(one.maxima * number for one, number in costs),
        cuts_block_rows=any(one.cuts_block_rows for one, _ in costs),
        numel=sum(one.numel * number for one, number in costs),
        owned=np.sum([one.owned * number for one, number in costs], axis=0),
        launches=np.sum(launches, axis=0) if launches else None,
    )
