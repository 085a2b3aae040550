"""Rows of a plan: memory, gather and step of a rank in every format."""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from math import prod
from typing import Any

from moe_optim.commands.plan.buckets import Bucket
from moe_optim.commands.plan.costs import (
    BF16,
    MASTER,
    MUON_ROWS,
    OPTIMIZER,
    PARTS,
    ROWS,
    STOCK_BF16,
    WEIGHTS,
    Costs,
    copy_bytes,
    count_costs,
    left_out,
    step_bytes,
)
from moe_optim.commands.plan.dense import dense_bytes
from moe_optim.commands.plan.experts import PlannedExperts
from moe_optim.commands.plan.gpus import Hardware
from moe_optim.commands.plan.stages import count_moe_layers
from moe_optim.commands.plan.step_times import StepTime, fused_step, stock_step
from moe_optim.config import MoEOptimConfig
from moe_optim.formats import FORMATS
from moe_optim.rules import offload_fraction

PlanRow = dict[str, Any]


def plan_rows(
    experts: PlannedExperts,
    gpus: Sequence[int],
    config: MoEOptimConfig | None = None,
    hardware: Hardware | None = None,
    dense: Sequence[int] | None = None,
    *,
    is_fused: bool = True,
    formats: Collection[str] | None = None,
) -> Iterator[PlanRow]:
    """Yield a row for every format, managed and stock, at each number of GPUs.

    Formats in :func:`left_out` have none. With ``compute``, a row ``bf16`` follows. Bytes are
    those of the rank with most masters: ``total_bytes_per_rank`` is the sum of weights, gradients,
    optimizer and ``step_memory_bytes_per_rank``, fp32 copies that Megatron's step makes of bf16
    gradients; ``against_stock_bytes`` is None if stock lacks the format; gathered bytes include
    the rank's own shard. ``step_ms`` is least and most time of the step without all-gather, None
    with Muon and with states on the host.

    Args:
        experts: experts of one pipeline stage.
        gpus: total numbers of GPUs.
        config: configuration of the recipe, with flags applied.
        hardware: memory and bandwidths; None omits times.
        dense: parameters outside of experts of each stage; None if they cannot be counted.
        is_fused: whether steps of quantized weights are fused.
        formats: formats of the rows, with stock bf16 among them; None for all.
    """
    config, hardware = config or MoEOptimConfig(), hardware or Hardware()
    excluded = left_out(experts)
    names = [
        one
        for one in (MUON_ROWS if experts.has_muon else ROWS)
        if one not in excluded and (formats is None or one in formats)
    ]
    for count in gpus:
        laid_out: dict[Any, Counter[Bucket]] = {}  # by block, which Muon's layouts depend on
        rows: dict[str, PlanRow] = {}
        for name in names:
            format = FORMATS.get(name) if experts.has_muon else None
            block = format and format.rowwise_block
            if block not in laid_out:
                laid_out[block] = experts.buckets(count, format)
            buckets = laid_out[block]
            on_host = config.offload_states if name in FORMATS else 0.0
            if name == STOCK_BF16:
                on_host = offload_fraction(experts.optimizer)
            total = count_costs(name, experts, buckets)
            rows[name] = {
                **{"format": name, "gpus": count},
                **_memory(name, total, experts, on_host, is_fused=is_fused),
                **_traffic(total, experts, count, hardware),
                "buckets": buckets.total(),
            }
        if config.compute is not None and config.format == "bf16":
            rows["bf16"] = _with_copies(rows[STOCK_BF16], copy_bytes(experts, config.compute))
        is_timed = is_fused and not config.offload_states
        for name, row in rows.items():
            total, stock = row["total_bytes_per_rank"], rows.get(f"stock {name}")
            yield row | {
                "against_stock_bf16_bytes": total - rows[STOCK_BF16]["total_bytes_per_rank"],
                "against_stock_bytes": stock and total - stock["total_bytes_per_rank"],
                **_model_memory(row, experts, dense),
                "step_ms": _step_time(
                    row, experts, dense, hardware.memory_tb_per_s, is_fused=is_timed
                ),
            }


def _memory(
    name: str, total: Costs, experts: PlannedExperts, on_host: float, *, is_fused: bool
) -> PlanRow:
    """Return the memory of the rank with most masters.

    A precision-aware Adam keeps 2 bytes of the master of a bf16 weight: the fp32 remainder
    (``store_param_remainders``), or fp16 by ``--main-params-dtype``; and it reads bf16 gradients
    (``_copy_model_grads_to_main_grads``). Quantized weights have fp32 masters, and
    ``--optimizer-cpu-offload`` uses another Adam.
    """
    most = max(total.owned)
    here = most - int(on_host * most)
    reads_bf16 = is_fused if name in FORMATS else _is_aware(name, experts)
    copies = experts.grad_bytes < 4 and not reads_bf16
    parts = {part: total.sums.get(part, 0) for part in PARTS} | {
        "masters": _master_bytes(name, experts) * here,
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


def _is_aware(name: str, experts: PlannedExperts) -> bool:
    return name == STOCK_BF16 and bool(experts.args.use_precision_aware_optimizer)


def _master_bytes(name: str, experts: PlannedExperts) -> int:
    halves = _is_aware(name, experts) and not experts.args.optimizer_cpu_offload
    return 2 if halves else MASTER


def _with_copies(row: PlanRow, nbytes: int) -> PlanRow:
    added = {key: row[key] + nbytes for key in ("weight_bytes_per_rank", "total_bytes_per_rank")}
    return row | added | {"format": "bf16", "parts": row["parts"] | {"compute_copies": nbytes}}


def _traffic(total: Costs, experts: PlannedExperts, gpus: int, hardware: Hardware) -> PlanRow:
    """Return gathered bytes and their time.

    An all-gather over n ranks transfers (n - 1) / n of its bytes at its bus bandwidth.
    """
    sums, dp_size = total.sums, experts.expert_dp_size(gpus)
    link = hardware.link_gb_per_s(gpus // experts.args.pipeline_model_parallel_size)
    transferred = sums["gathered"] * (dp_size - 1) / dp_size
    return {
        "gathered_bytes_per_step": sums["gathered"],
        "gather_ms": None if link is None else transferred / (link * 1e6),
        "link_gb_per_s": link,
        "padding_fraction": (sums["numel"] - sums["used"]) / sums["numel"],
        "shard_imbalance": max(total.owned) * dp_size / sums["used"],
        "expert_data_parallel_size": dp_size,
    }


def _model_memory(row: PlanRow, experts: PlannedExperts, dense: Sequence[int] | None) -> PlanRow:
    if dense is None:
        return {"dense_bytes_per_rank": None, "model_bytes_per_rank": None}
    of_stages = [
        dense_bytes(
            numel,
            experts.dense_dp_size(row["gpus"]),
            grad_bytes=experts.grad_bytes,
            moment_bytes=8 if experts.has_muon else experts.moment_bytes,  # Adam's, beside Muon
            master_bytes=_master_bytes(row["format"], experts),
        )
        for numel in dense
    ]
    total, layers = row["total_bytes_per_rank"], experts.layers
    model, stage = max(
        (own + total * sum(chunks) // layers, own)
        for own, chunks in zip(of_stages, count_moe_layers(experts.args), strict=True)
    )
    return {"dense_bytes_per_rank": stage, "model_bytes_per_rank": model}


def _step_time(
    row: PlanRow,
    experts: PlannedExperts,
    dense: Sequence[int] | None,
    tb_per_s: float | None,
    *,
    is_fused: bool,
) -> StepTime | None:
    """Return the time of Adam's step with all states on the device; None for others."""
    if tb_per_s is None or experts.has_muon or experts.args.optimizer_cpu_offload:
        return None
    name, most = row["format"], row["owned_parameters_per_rank"]
    own = dense[experts.stage] if dense else 0
    own = -(-own // experts.dense_dp_size(row["gpus"]))
    grads, moments = experts.grad_bytes, experts.moment_bytes
    if name in FORMATS and is_fused:
        nbytes = grads * most  # the norm reads them before
        nbytes += round(step_bytes(FORMATS[name], most, grad_bytes=grads, moment_bytes=moments))
        nbytes += own * (2 * grads + 2 * MASTER + 2 * moments + BF16)
        return fused_step(nbytes, tb_per_s)
    if name in FORMATS or name.removeprefix("stock ") not in FORMATS:
        return None  # not measured
    weights = experts.layers * sum(prod(shape[:1]) for _, shape in experts.weights)
    return stock_step(most + own, weights, tb_per_s)
