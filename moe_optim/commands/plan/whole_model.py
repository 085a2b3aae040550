"""Rows of a plan, completed: memory of the whole model, and the time of a step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from moe_optim.commands.plan.costs import STOCK_BF16, PlanRow, plan_rows
from moe_optim.commands.plan.dense import count_dense, dense_bytes, dense_step_bytes
from moe_optim.commands.plan.experts import PlannedExperts
from moe_optim.commands.plan.gpus import Hardware
from moe_optim.commands.plan.stages import count_moe_layers
from moe_optim.commands.plan.step_times import StepTime, fused_step, stock_step
from moe_optim.config import MoEOptimConfig
from moe_optim.errors import ConfigError

_ADAM_BYTES = 8  # of both moments of dense weights that Muon does not step


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseWeights:
    """Parameters outside of experts."""

    stages: tuple[int, ...] | None
    """Parameters of each pipeline stage on one rank; None if they cannot be counted."""
    reason: str = ""
    """Why they cannot be counted."""


def find_dense(experts: PlannedExperts) -> DenseWeights:
    """Count the parameters outside of experts, or say why they cannot be counted."""
    try:
        return DenseWeights(stages=tuple(count_dense(experts.args)))
    except ConfigError as error:
        return DenseWeights(stages=None, reason=str(error))


def complete_rows(
    experts: PlannedExperts,
    dense: DenseWeights,
    config: MoEOptimConfig,
    gpus: Sequence[int],
    hardware: Hardware,
    *,
    is_fused: bool,
) -> Iterator[PlanRow]:
    """Yield the rows of :func:`plan_rows` with further keys.

    - ``dense_bytes_per_rank``: weights, gradients and states outside of experts, of the fullest
      stage
    - ``model_bytes_per_rank``: these and the experts of that stage; None if not counted
    - ``link_gb_per_s``: bandwidth that ``gather_ms`` assumes
    - ``step_ms``: least and most time of the optimizer step without all-gather; None if unknown

    Args:
        experts: experts of the stage with most of them.
        dense: parameters outside of experts.
        config: configuration of the recipe, with flags applied.
        gpus: total numbers of GPUs.
        hardware: memory and bandwidths.
        is_fused: whether steps of quantized weights are fused.
    """
    for count in gpus:
        link = hardware.link_gb_per_s(count // experts.args.pipeline_model_parallel_size)
        rows = plan_rows(
            experts,
            [count],
            is_fused=is_fused,
            offload_states=config.offload_states,
            memory_tb_per_s=hardware.memory_tb_per_s,
            network_gb_per_s=link,
            compute=config.compute if config.format == "bf16" else None,
        )
        for row in rows:
            yield row | {
                **_memory(row, experts, dense),
                "link_gb_per_s": link,
                "step_ms": _step_time(row, experts, dense, hardware.memory_tb_per_s),
            }


def _memory(row: PlanRow, experts: PlannedExperts, dense: DenseWeights) -> PlanRow:
    if dense.stages is None:
        return {"dense_bytes_per_rank": None, "model_bytes_per_rank": None}
    args = experts.args
    halves = row["format"] == STOCK_BF16 and args.use_precision_aware_optimizer
    of_stages = [
        dense_bytes(
            numel,
            _dense_ranks(experts, row["gpus"]),
            grad_bytes=experts.grad_bytes,
            moment_bytes=_dense_moments(experts),
            master_bytes=2 if halves and not args.optimizer_cpu_offload else 4,
        )
        for numel in dense.stages
    ]
    total, layers = row["total_bytes_per_rank"], experts.layers
    model, stage = max(
        (own + total * sum(chunks) // layers, own)
        for own, chunks in zip(of_stages, count_moe_layers(args), strict=True)
    )
    return {"dense_bytes_per_rank": stage, "model_bytes_per_rank": model}


def _dense_ranks(experts: PlannedExperts, gpus: int) -> int:
    """Return how many ranks divide the states of a dense weight."""
    args = experts.args
    copy = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    return int(gpus // copy // args.num_distributed_optimizer_instances)


def _dense_moments(experts: PlannedExperts) -> int:
    return _ADAM_BYTES if experts.has_muon else experts.moment_bytes


def _step_time(
    row: PlanRow, experts: PlannedExperts, dense: DenseWeights, tb_per_s: float | None
) -> StepTime | None:
    """Return the time of Adam's step with all states on the device; None for others."""
    if tb_per_s is None or experts.has_muon or experts.args.optimizer_cpu_offload:
        return None
    own = dense.stages[experts.stage] if dense.stages else 0
    own = -(-own // _dense_ranks(experts, row["gpus"]))
    if row["step_floor_ms"] is not None:
        others = dense_step_bytes(
            own, grad_bytes=experts.grad_bytes, moment_bytes=experts.moment_bytes
        )
        nbytes = row["norm_bytes_per_rank"] + row["update_bytes_per_rank"] + others
        return fused_step(nbytes, tb_per_s)
    if not row["format"].startswith("stock ") or row["format"] == STOCK_BF16:
        return None  # not measured
    weights = experts.layers * sum(prod(shape[:1]) for _, shape in experts.weights)
    return stock_step(row["owned_parameters_per_rank"] + own, weights, tb_per_s)
