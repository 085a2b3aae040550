"""The expert weights of a run that is not there: shapes, ranks and buckets from Megatron's flags.

One pipeline stage is planned, the one with most experts, and of several such stages the first:
Megatron cuts only the first model chunk of the first stage into buckets. The experts are planned
alone. Their biases are left out, and so is what else Megatron puts into the buckets of bf16 experts
where all ranks hold the same ones.
"""

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from moe_optim.buckets.aligned_layout import BucketEnd, aligned_end
from moe_optim.buckets.buffer_plan import Slot
from moe_optim.buckets.stock_layout import bucket_divisor, lay_buckets
from moe_optim.commands.hugging_face.values import MOST_LAYERS
from moe_optim.commands.plan.flags import parse_flags
from moe_optim.commands.plan.stages import check_divides, count_moe_layers
from moe_optim.errors import ConfigError, refuse
from moe_optim.formats import BlockScaledFormat
from moe_optim.integration.arguments import ranks_multiple

Shape = tuple[int, int, int]
_MOMENTS = MappingProxyType(
    {
        "fp32": ("torch.float32", 4),
        "bf16": ("torch.bfloat16", 2),
        "fp16": ("torch.float16", 2),
        "fp8": ("torch.uint8", 1),
    }
)
"""Moments as the flags of precision-aware optimizers spell them -> their dtype, and its bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedBucket:
    """Parameters of one bucket as Megatron lays them, whatever their storage. A hashable value."""

    slots: tuple[Slot, ...]
    dp_size: int
    """Ranks that own an equal part of it each."""
    stock_numel: int
    """Elements up to where Megatron ends the bucket."""
    divisor: int
    """What Megatron pads the end of a bucket to."""

    @property
    def used(self) -> int:
        """Elements of parameters."""
        return sum(slot.numel for slot in self.slots)

    def aligned_end(self, format: BlockScaledFormat) -> BucketEnd:
        """Return where the bucket ends with ``layout: aligned``."""
        return aligned_end(format, self.slots, dp_size=self.dp_size, divisor=self.divisor)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedExperts:
    """Expert weights of the pipeline stage that holds most of them."""

    weights: tuple[tuple[str, Shape], ...]
    """Linears of one layer by name, with the [experts, rows, columns] of one rank."""
    chunks: tuple[int, ...]
    """MoE layers of each model chunk of the stage."""
    stage: int
    pipeline: int
    """Pipeline stages."""
    ranks_per_model: int
    """Ranks that work on the same samples: tensor times pipeline times context parallel."""
    ranks_per_dense_copy: int
    """Ranks that hold one copy of all that is not an expert: tensor times pipeline parallel."""
    ranks_per_expert_copy: int
    """Ranks that hold one copy of all experts: expert tensor times expert times pipeline."""
    gpus_multiple: int
    """What the number of GPUs must be a multiple of."""
    most_micro_batches: int | None
    """How often a global batch can be cut into micro-batches; None where flags do not say."""
    optimizer_instances: int
    exp_avg_dtype: str
    exp_avg_sq_dtype: str
    fp16: bool
    loss_scale: float | None
    optimizer_cpu_offload: bool
    optimizer_offload_fraction: float
    """This and the five before it are of Megatron's ``OptimizerConfig``."""
    grouped: bool
    """Whether all experts of a linear are one parameter."""
    is_portable: bool
    """Whether the modules are portable experts, and not Transformer Engine's."""
    is_native: bool
    """Whether modules of Transformer Engine keep quantized weights."""
    in_te: bool
    """Whether quantized weights lie in tensors of Transformer Engine."""
    precision_aware: bool
    """``--use-precision-aware-optimizer``."""
    moment_bytes: int
    """What both moments of an element take."""
    grad_bytes: int
    """What the gradient of an element takes in the buffer."""
    bucket_size: int | None
    """``--ddp-bucket-size``; None takes Megatron's rule."""
    overlap_grad_reduce: bool
    high_busbw: bool

    @property
    def layers(self) -> int:
        """MoE layers of the stage."""
        return sum(self.chunks)

    @property
    def num_experts(self) -> int:
        """Matrices of experts that a rank of the stage holds, of all linears."""
        return self.layers * sum(shape[0] for _, shape in self.weights)

    def expert_dp_size(self, gpus: int) -> int:
        """Return how many ranks share the masters of an expert.

        Raises:
            ConfigError: that many GPUs cannot be cut as the flags say.
        """
        if gpus > MOST_RANKS:
            raise ConfigError(
                f"--gpus: expected at most {MOST_RANKS:,}, got {gpus}. Give fewer, or smaller "
                "parallel sizes after `--`."
            )
        if gpus < 1 or gpus % self.gpus_multiple:
            raise ConfigError(
                f"--gpus: expected multiples of {self.gpus_multiple}, which the parallel sizes of "
                f"megatron_args take, got {gpus}. Give another number, or change them after `--`."
            )
        return gpus // self.ranks_per_expert_copy // self.optimizer_instances

    def buckets(self, gpus: int) -> Counter[PlannedBucket]:
        """Return the buckets of one rank, with how many there are of each kind.

        Raises:
            ConfigError: that many GPUs cannot be cut as the flags say.
        """
        dp_size = self.expert_dp_size(gpus)
        found: Counter[PlannedBucket] = Counter()
        for chunk, layers in enumerate(self.chunks):
            is_cut = chunk == 0 and self.stage == 0 and self.overlap_grad_reduce
            size = self._bucket_numel(gpus // self.ranks_per_dense_copy) if is_cut else None
            found.update(self._lay_out(layers, size, dp_size))
        return found

    def _bucket_numel(self, dp_size: int) -> int:
        """Return when a bucket is full, by ``resolve_ddp_bucket_size`` of Megatron's training."""
        return self.bucket_size or max(40_000_000, 1_000_000 * dp_size)

    def _lay_out(
        self, layers: int, bucket_size: int | None, dp_size: int
    ) -> "Counter[PlannedBucket]":
        params = [
            (name, shape if self.grouped else (1, *shape[1:]))
            for _ in range(layers)
            for name, shape in self.weights
            for _ in range(1 if self.grouped else shape[0])
        ]
        divisor = bucket_divisor(dp_size, high_busbw=self.high_busbw)
        return Counter(
            PlannedBucket(
                slots=bucket.slots, dp_size=dp_size, stock_numel=bucket.numel, divisor=divisor
            )
            for bucket in lay_buckets(params, bucket_size, divisor)
        )


MOST_EXPERTS = MOST_RANKS = 2**20
"""Many times those of any run: plans of more would take minutes, and wrap what counts bytes."""
_MOST_WIDTH = 2**18

_LIMITS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "num_layers": (1, MOST_LAYERS),
        "num_layers_per_virtual_pipeline_stage": (1, MOST_LAYERS),
        "num_virtual_stages_per_pipeline_rank": (1, MOST_LAYERS),
        "mtp_num_layers": (0, MOST_LAYERS),
        "decoder_first_pipeline_num_layers": (0, MOST_LAYERS),
        "decoder_last_pipeline_num_layers": (0, MOST_LAYERS),
        "hidden_size": (1, _MOST_WIDTH),
        "ffn_hidden_size": (1, _MOST_WIDTH),
        "moe_ffn_hidden_size": (1, _MOST_WIDTH),
        "num_experts": (1, MOST_EXPERTS),
        "tensor_model_parallel_size": (1, MOST_RANKS),
        "pipeline_model_parallel_size": (1, MOST_RANKS),
        "context_parallel_size": (1, MOST_RANKS),
        "expert_model_parallel_size": (1, MOST_RANKS),
        "expert_tensor_parallel_size": (1, MOST_RANKS),
        "num_distributed_optimizer_instances": (1, MOST_RANKS),
    }
)
"""Flags that are counts, with the least and the most that is planned."""


def plan_experts(
    argv: Sequence[str], *, grouped: bool, stores_in_te: bool = False
) -> PlannedExperts:
    """Read what a run with these flags would hold; nothing is built, and no GPU is needed.

    Args:
        argv: Megatron's flags.
        grouped: whether all experts of a linear are one parameter.
        stores_in_te: whether portable experts have tensors of Transformer Engine.

    Raises:
        ConfigError: naming the flag that is missing, that does not fit the others, or whose effect
            is not planned.
    """
    args = parse_flags(argv)
    _require(args)
    _refuse(args)
    _check_counts(args)
    tensor, pipeline = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    expert, context = args.expert_model_parallel_size, args.context_parallel_size
    expert_tensor = args.expert_tensor_parallel_size or tensor
    ffn = args.moe_ffn_hidden_size or args.ffn_hidden_size
    check_divides("--num-experts", args.num_experts, "--expert-model-parallel-size", expert)
    check_divides("--moe-ffn-hidden-size", ffn, "--expert-tensor-parallel-size", expert_tensor)
    experts, rows, hidden = args.num_experts // expert, ffn // expert_tensor, args.hidden_size
    stages = count_moe_layers(args)
    stage = max(range(pipeline), key=lambda index: sum(stages[index]))
    instances = args.num_distributed_optimizer_instances
    dense, whole = tensor * pipeline, expert_tensor * expert * pipeline
    is_portable = args.transformer_impl == "local"
    is_native = not is_portable and (args.fp8_param_gather or args.fp4_param_gather)
    exp_avg, exp_avg_sq = _MOMENTS[args.exp_avg_dtype], _MOMENTS[args.exp_avg_sq_dtype]
    most_micro_batches = None
    if args.global_batch_size and args.micro_batch_size:
        most_micro_batches = max(1, args.global_batch_size // args.micro_batch_size)
    return PlannedExperts(
        weights=(
            ("experts.linear_fc1.weight", (experts, 2 * rows, hidden)),
            ("experts.linear_fc2.weight", (experts, hidden, rows)),
        ),
        chunks=stages[stage],
        stage=stage,
        pipeline=pipeline,
        ranks_per_model=dense * context,
        ranks_per_dense_copy=dense,
        ranks_per_expert_copy=whole,
        gpus_multiple=ranks_multiple(args),
        most_micro_batches=most_micro_batches,
        optimizer_instances=instances,
        exp_avg_dtype=exp_avg[0],
        exp_avg_sq_dtype=exp_avg_sq[0],
        moment_bytes=exp_avg[1] + exp_avg_sq[1],
        precision_aware=args.use_precision_aware_optimizer,
        is_portable=is_portable,
        is_native=is_native,
        in_te=is_native or stores_in_te,
        fp16=args.fp16,
        loss_scale=args.loss_scale,
        optimizer_cpu_offload=args.optimizer_cpu_offload,
        optimizer_offload_fraction=args.optimizer_offload_fraction,
        grouped=grouped,
        # With either, as validate_args: Megatron takes gradients in bf16 nowhere else.
        grad_bytes=2 if args.grad_reduce_in_bf16 or args.main_grads_dtype == "bf16" else 4,
        bucket_size=args.ddp_bucket_size,
        overlap_grad_reduce=args.overlap_grad_reduce,
        high_busbw=args.ddp_pad_buckets_for_high_nccl_busbw,
    )


def _require(args: argparse.Namespace) -> None:
    """Raise ConfigError for the first flag without which there is nothing to plan."""
    needed: dict[str, Any] = {
        "--num-layers": args.num_layers,
        "--hidden-size": args.hidden_size,
        "--num-experts": args.num_experts,
        "--moe-ffn-hidden-size": args.moe_ffn_hidden_size or args.ffn_hidden_size,
        "--bf16": args.bf16,
        "--swiglu or --quick-geglu": args.swiglu or args.quick_geglu,
    }
    for flag, value in needed.items():
        if not value:
            raise ConfigError(
                f"megatron_args: expected {flag}, got none. Add it to the recipe, or after `--`."
            )


def _refuse(args: argparse.Namespace) -> None:
    """Raise ConfigError for what would change the figures, or what no run with experts takes."""
    refused = {
        "--ddp-num-buckets, which counts parameters that are no experts (give --ddp-bucket-size)": (
            args.ddp_num_buckets is not None
        ),
        "--heterogeneous-layers-config-*": (
            args.heterogeneous_layers_config_path is not None
            or args.heterogeneous_layers_config_encoded_json is not None
        ),
        "--hybrid-layer-pattern": args.hybrid_layer_pattern is not None,
        "--moe-latent-size": args.moe_latent_size is not None,
        "--mtp-use-repeated-layer": args.mtp_use_repeated_layer,
        f"--optimizer {args.optimizer} (give adam)": args.optimizer != "adam",
        "--overlap-param-gather-with-optimizer-step": (
            args.overlap_param_gather_with_optimizer_step
        ),
        "--use-megatron-fsdp": args.use_megatron_fsdp,
        "--use-torch-fsdp2": args.use_torch_fsdp2,
    }
    refuse(
        refused,
        expected="megatron_args: expected flags whose effect is planned",
        remedy="Leave them out of the plan.",
    )


def _check_counts(args: argparse.Namespace) -> None:
    """Raise ConfigError for a size that nothing can be made of, or that no run has."""
    for name, (least, most) in _LIMITS.items():
        value, flag = getattr(args, name), f"--{name.replace('_', '-')}"
        if value is not None and value < least:
            raise ConfigError(f"{flag}: expected {least} or more, got {value}. Correct the recipe.")
        if value is not None and value > most:
            raise ConfigError(
                f"{flag}: expected at most {most:,}, got {value}. Correct the recipe."
            )
    if args.num_layers * args.num_experts > MOST_EXPERTS:
        raise ConfigError(
            f"--num-layers {args.num_layers} with --num-experts {args.num_experts}: expected at "
            f"most {MOST_EXPERTS:,} experts in all, got {args.num_layers * args.num_experts:,}. "
            "Correct the recipe."
        )
