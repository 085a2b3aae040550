"""Costs of expert weights per rank, counted on the layouts that a run would use.

All counts are exact and follow from shapes: buffers from ``plan_buffers``, buckets from Megatron's
layout, exchanged maxima from ``plan_exchange``. Excluded are kernel tables (addresses, tiles,
slots), allocator rounding, and temporary allocations of Megatron's own casts.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from math import prod
from typing import Any, NamedTuple

import numpy as np

from moe_optim.buckets.layout import Slot, plan_buffers
from moe_optim.commands.plan.census import Counts, count_block_rows, count_owned
from moe_optim.commands.plan.copies import copy_bytes
from moe_optim.commands.plan.experts import PlannedBucket, PlannedExperts
from moe_optim.commands.plan.stock_layout import packed_nbytes
from moe_optim.errors import LayoutError
from moe_optim.formats import DIRECTIONS, FORMATS, BlockScaledFormat
from moe_optim.kernels.exchange import plan_exchange
from moe_optim.rules import offload_fraction

_MASTER, _BF16 = 4, 2  # bytes
STOCK_BF16, STOCK_MXFP8, STOCK_NVFP4, STOCK_FP8_BLOCK = STOCKS = (
    "stock bf16",
    "stock mxfp8",
    "stock nvfp4",
    "stock fp8_block",
)
"""Stock Megatron: bf16 weights in a parameter buffer, trained without FP8; MXFP8 weights gathered
in bf16 through the gradient memory; FP8 blocks and NVFP4 with rowwise data in a parameter buffer.
"""
ROWS = (*FORMATS, *STOCKS)
"""Formats of the rows of a plan, for each number of GPUs, unless weights do not fit them."""
MUON_ROWS = (*FORMATS, STOCK_BF16)
"""The same with Muon. Stock's layer-wise optimizer gathers bf16, whatever the weights are kept in.
"""

BUFFERS = tuple(f"{way}_{kind}" for way in DIRECTIONS for kind in ("data", "scale"))
WEIGHTS = (
    *(*BUFFERS, "global_amax", "storage_scales"),
    *("parameter_buffer", "exchange", "compute_copies"),
)
OPTIMIZER = ("masters", "moments")
PARTS = (*WEIGHTS, "gradients", *OPTIMIZER, "gradient_copies")
"""Components of a rank's bytes. The first five are fields of ``QuantizedWeight``; storage scales
are the padded, replicated ones that Transformer Engine's GEMMs read; the parameter buffer is
Megatron's; the exchange holds the maxima that ranks reduce; compute copies are those of
:func:`copy_bytes`; gradient copies are made by a step.
"""


def left_out(experts: PlannedExperts) -> dict[str, str]:
    """Return the formats that these weights cannot be stored in, each with the reason."""
    reasons: dict[str, str] = {}
    for name, format in FORMATS.items():
        if experts.in_te and format.is_row_only:
            reasons[name] = "Transformer Engine's tensors have columnwise data"
        for weight, shape in experts.weights:
            try:
                format.check_shape(shape, weight)
            except LayoutError as error:
                reasons.setdefault(name, str(error).partition(". ")[0])
    return reasons


STEP_FIGURES = (
    *("norm_bytes_per_rank", "update_bytes_per_rank"),
    *("step_bytes_per_parameter", "step_floor_ms"),
)
"""Numbers of a fused step in a row."""

PlanRow = dict[str, Any]


class Costs(NamedTuple):
    """Costs of one bucket, or of all buckets of a rank."""

    parts: Mapping[str, int]
    """Component of :data:`PARTS` -> bytes; masters and moments follow from :attr:`owned`."""
    gathered: int
    """Bytes of the gather on each rank, including its own shard."""
    maxima: int
    """fp32 values that ranks reduce with MAX before encoding; each rank holds all of them."""
    cuts_blocks: bool
    numel: int
    """Elements, including padding."""
    owned: Counts
    """[dp_size] int64: weight elements whose masters each rank owns."""
    launches: Counts | None
    """[dp_size] int64: launches that quantize, compute maxima, or derive buffers; None: unknown."""


def norm_bytes(numel: int, *, grad_bytes: int) -> int:
    """Return the minimum bytes read by the norm of ``numel`` gradients."""
    return numel * grad_bytes


def step_bytes(
    format: BlockScaledFormat, numel: int, *, grad_bytes: int, moment_bytes: int
) -> Fraction:
    """Return the minimum bytes that a fused Adam step, including encoding, reads and writes.

    The step reads gradients, reads and writes masters and both moments (``moment_bytes`` together),
    and writes gathered buffers. It reads masters twice if the codes depend on an amax of the
    expert.
    """
    masters = _MASTER * (3 if format.has_global_amax else 2)
    return numel * (grad_bytes + masters + 2 * moment_bytes + format.gathered_bytes_per_element)


def plan_rows(
    experts: PlannedExperts,
    gpus: Sequence[int],
    *,
    is_fused: bool = True,
    offload_states: float = 0.0,
    memory_tb_per_s: float | None = None,
    network_gb_per_s: float | None = None,
    compute: str | None = None,
) -> Iterator[PlanRow]:
    """Yield a row for every format, managed and stock, at each number of GPUs.

    Formats in :func:`left_out` have none. With ``compute``, a row ``bf16`` follows. Bytes are
    those of the rank with most masters. Keys of a row:

    - ``weight_bytes_per_rank``: all buffers of the weights, and exchanged maxima
    - ``gradient_bytes_per_rank``: gradients in their own dtype
    - ``optimizer_bytes_per_rank``: masters and two moments, or Muon's momentum
    - ``step_memory_bytes_per_rank``: fp32 copies that Megatron's step makes of bf16 gradients
    - ``total_bytes_per_rank``: sum of the above
    - ``owned_parameters_per_rank``: elements whose masters the rank owns
    - ``against_stock_bf16_bytes``, ``against_stock_bytes``: total minus that of stock in bf16, and
      in the same format if stock supports it
    - ``gathered_bytes_per_step``: bytes after the gather, including the rank's own shard
    - ``gather_ms``: time of the gather at the bus bandwidth
    - ``launches_per_step``: kernel launches, without copies and fills; not counted with Muon
    - ``norm_bytes_per_rank``, ``update_bytes_per_rank``: minimum traffic of a fused step
    - ``step_bytes_per_parameter``: the latter per parameter
    - ``step_floor_ms``: time of both at the memory bandwidth; None without a fused step, and
      with Muon
    - ``padding_fraction``: part of all buckets without weights
    - ``shard_imbalance``: largest number of owned elements over the mean

    Args:
        experts: experts of one pipeline stage.
        gpus: total numbers of GPUs.
        is_fused: whether steps of quantized weights are fused.
        offload_states: fraction of their masters and moments on the host. Staging chunks on the
            device, and the time of copies, are not counted.
        memory_tb_per_s: memory bandwidth in TB/s; None omits times.
        network_gb_per_s: bus bandwidth of an all-gather in GB/s; None omits times.
        compute: format of the GEMMs of bf16 experts; None without copies.
    """
    excluded = left_out(experts)
    names = [one for one in (MUON_ROWS if experts.has_muon else ROWS) if one not in excluded]
    for count in gpus:
        shared = None if experts.has_muon else experts.buckets(count)
        dp_size = experts.expert_dp_size(count)
        rows: dict[str, PlanRow] = {}
        for name in names:
            buckets = shared or experts.matrix_buckets(count, FORMATS.get(name))
            used = sum(bucket.used * number for bucket, number in buckets.items())
            total = _total([(_costs_of(name, one, experts), n) for one, n in buckets.items()])
            format = FORMATS.get(name)
            on_host = offload_states if format is not None else 0.0
            if name == STOCK_BF16:
                on_host = offload_fraction(experts.optimizer)
            rows[name] = {
                "format": name,
                "gpus": count,
                **_memory(name, total, experts, on_host, is_fused=is_fused),
                **_traffic(total, used, dp_size, network_gb_per_s),
                "path": _path_of(name, total),
                **_step(
                    format if is_fused and not experts.has_muon else None,
                    int(total.owned.max()),
                    experts,
                    None if on_host else memory_tb_per_s,
                ),
                "expert_data_parallel_size": dp_size,
                "buckets": buckets.total(),
            }
        if compute is not None:
            rows["bf16"] = _with_copies(rows[STOCK_BF16], copy_bytes(experts, compute))
        totals = {name: row["total_bytes_per_rank"] for name, row in rows.items()}
        for name, row in rows.items():
            stock = totals.get(f"stock {name}")
            row["against_stock_bf16_bytes"] = totals[name] - totals[STOCK_BF16]
            row["against_stock_bytes"] = None if stock is None else totals[name] - stock
            yield row


def _memory(
    name: str, total: Costs, experts: PlannedExperts, on_host: float, *, is_fused: bool
) -> PlanRow:
    """Return the memory of the rank with most masters.

    A precision-aware Adam keeps 2 bytes of the master of a bf16 weight: the fp32 remainder
    (``store_param_remainders``), or fp16 by ``--main-params-dtype``; and it reads bf16 gradients
    (``_copy_model_grads_to_main_grads``). Quantized weights have fp32 masters, and
    ``--optimizer-cpu-offload`` uses another Adam.
    """
    most = int(total.owned.max())
    here = most - int(on_host * most)
    aware = name == STOCK_BF16 and experts.args.use_precision_aware_optimizer
    master_bytes = 2 if aware and not experts.args.optimizer_cpu_offload else _MASTER
    copies = experts.grad_bytes < 4 and not (is_fused if name in FORMATS else aware)
    parts = {**dict.fromkeys(PARTS, 0), **total.parts} | {
        "masters": master_bytes * here,
        "moments": experts.moment_bytes * here,
        "gradient_copies": 4 * most * copies,
    }
    return {
        "weight_bytes_per_rank": sum(parts[name] for name in WEIGHTS),
        "gradient_bytes_per_rank": parts["gradients"],
        "optimizer_bytes_per_rank": sum(parts[name] for name in OPTIMIZER),
        "step_memory_bytes_per_rank": parts["gradient_copies"],
        "total_bytes_per_rank": sum(parts.values()),
        "owned_parameters_per_rank": most,
        "parts": parts,
    }


def _with_copies(row: PlanRow, nbytes: int) -> PlanRow:
    """Return the row of bf16 experts with copies of ``nbytes``."""
    added = {key: row[key] + nbytes for key in ("weight_bytes_per_rank", "total_bytes_per_rank")}
    return row | added | {"format": "bf16", "parts": row["parts"] | {"compute_copies": nbytes}}


def _traffic(total: Costs, used: int, dp_size: int, network_gb_per_s: float | None) -> PlanRow:
    """Return gathered bytes, their time, and launches.

    An all-gather over n ranks transfers (n - 1) / n of its bytes at its bus bandwidth.
    """
    gather_ms = None
    if network_gb_per_s is not None:
        gather_ms = total.gathered * (dp_size - 1) / dp_size / (network_gb_per_s * 1e6)
    return {
        "gathered_bytes_per_step": total.gathered,
        "gather_ms": gather_ms,
        "launches_per_step": None if total.launches is None else int(total.launches.max()),
        "padding_fraction": (total.numel - used) / total.numel,
        "shard_imbalance": int(total.owned.max()) * len(total.owned) / used,
        "exchanged_maxima": total.maxima,
    }


def _path_of(name: str, total: Costs) -> str:
    if name in FORMATS:
        return "partial amax" if total.cuts_blocks else "aligned"
    return "bf16 wire" if name in (STOCK_BF16, STOCK_MXFP8) else "by weight"


def _step(
    format: BlockScaledFormat | None, most: int, experts: PlannedExperts, tb_per_s: float | None
) -> PlanRow:
    """Return the traffic of a fused step of ``most`` elements, None values without one."""
    if format is None:
        return dict.fromkeys(STEP_FIGURES)
    grad_bytes = experts.grad_bytes
    norm = norm_bytes(most, grad_bytes=grad_bytes)
    update = step_bytes(format, most, grad_bytes=grad_bytes, moment_bytes=experts.moment_bytes)
    floor_ms = None if tb_per_s is None else float(norm + update) / (tb_per_s * 1e9)
    figures = norm, round(update), float(update / most), floor_ms
    return dict(zip(STEP_FIGURES, figures, strict=True))


def _costs_of(name: str, bucket: PlannedBucket, experts: PlannedExperts) -> Costs:
    if name in FORMATS:
        costs = _quantized_costs(FORMATS[name], bucket, experts)
        return costs._replace(launches=None) if experts.has_muon else costs
    return _stock_costs(FORMATS.get(name.removeprefix("stock ")), bucket, experts.grad_bytes)


def _quantized_costs(
    format: BlockScaledFormat, bucket: PlannedBucket, experts: PlannedExperts
) -> Costs:
    """Count ``wire: quantized`` with ``layout: aligned``."""
    slots, dp_size = bucket.slots, bucket.dp_size
    numel = bucket.numel(format)
    gathered = {one.name: one.nbytes for one in plan_buffers(format, slots, numel, dp_size)}
    parts = dict(gathered)
    if format.columnwise_copy == "transposed":
        parts["columnwise_data"] = _data_bytes(format, slots)
    if experts.in_te:  # padded scales besides the buffers
        parts["storage_scales"] = sum(_storage_scale_bytes(format, slots).values())
    elif format.is_2d:
        scales = sum(prod(format.scale_shape(slot.shape, "columnwise")) for slot in slots)
        parts["columnwise_scale"] = scales * format.scale_itemsize
    maxima = sum(
        plan_exchange(format, slot.shape, slot.cuts(numel // dp_size), name=slot.name).size
        for slot in slots
    )
    block_rows = count_block_rows(format, slots, numel, dp_size)
    owned = count_owned(slots, numel, dp_size)
    # as in LaunchTable and bind_finish: expert amaxes, whole rows, cut rows twice
    derives = format.is_2d or experts.in_te
    launches = (block_rows.whole > 0).astype(np.int64) + 2 * block_rows.has_cut + int(derives)
    if format.has_global_amax:
        launches += owned > 0
    return Costs(
        parts={**parts, "exchange": 4 * maxima, "gradients": numel * experts.grad_bytes},
        gathered=sum(gathered.values()),
        maxima=maxima,
        cuts_blocks=bool(block_rows.has_cut.any()),
        numel=numel,
        owned=owned,
        launches=launches,
    )


def _data_bytes(format: BlockScaledFormat, slots: Sequence[Slot]) -> int:
    return sum(prod(format.data_shape(slot.shape, "rowwise")) for slot in slots)


def _storage_scale_bytes(format: BlockScaledFormat, slots: Sequence[Slot]) -> dict[str, int]:
    return {
        f"{way}_scale": sum(
            experts * prod(format.storage_scale_shape(rows, cols, way)) * format.scale_itemsize
            for experts, rows, cols in (slot.shape for slot in slots)
        )
        for way in DIRECTIONS
    }


def _stock_costs(format: BlockScaledFormat | None, bucket: PlannedBucket, grad_bytes: int) -> Costs:
    """Count stock Megatron's distributed optimizer; bf16 if ``format`` is None.

    Quantized weights are Transformer Engine tensors with padded scales. MXFP8 is quantized after
    the gather, each expert separately; the gather reuses the gradient memory
    (``--reuse-grad-buf-for-mxfp8-param-ag``). Other formats are quantized before the gather, with
    the rowwise data as the parameter buffer; their launches are not counted.
    """
    slots, numel, dp_size = bucket.slots, bucket.stock_numel, bucket.dp_size
    experts = sum(slot.shape[0] for slot in slots)
    gathered, parts, launches = _BF16 * numel, {"parameter_buffer": _BF16 * numel}, 0
    after_gather = format is not None and format.columnwise_copy == "quantized"
    if format is not None:
        parts = _storage_scale_bytes(format, slots)
        parts["columnwise_data"] = _data_bytes(format, slots)
        if after_gather:
            parts["rowwise_data"] = _data_bytes(format, slots)
            launches = experts
        else:
            gathered = packed_nbytes(slots, format.elements_per_byte, bucket.divisor)
            parts["parameter_buffer"] = gathered
            parts["global_amax"] = 2 * 4 * experts * format.has_global_amax
    counted = format is None or after_gather
    return Costs(
        parts={**parts, "gradients": numel * grad_bytes},
        gathered=gathered,
        maxima=0,
        cuts_blocks=False,
        numel=numel,
        owned=count_owned(slots, numel, dp_size),
        launches=np.full(dp_size, launches, dtype=np.int64) if counted else None,
    )


def _total(costs: Sequence[tuple[Costs, int]]) -> Costs:
    """Return the sum over buckets, given the costs and number of each kind."""
    parts: Counter[str] = Counter()
    for one, number in costs:
        for name, count in one.parts.items():
            parts[name] += count * number
    launches = [one.launches * number for one, number in costs if one.launches is not None]
    return Costs(
        parts=parts,
        gathered=sum(one.gathered * number for one, number in costs),
        maxima=sum(one.maxima * number for one, number in costs),
        cuts_blocks=any(one.cuts_blocks for one, _ in costs),
        numel=sum(one.numel * number for one, number in costs),
        owned=np.sum([one.owned * number for one, number in costs], axis=0),
        launches=np.sum(launches, axis=0) if launches else None,
    )
