"""Expert weights of a planned run: shapes, ranks and buckets from Megatron's flags.

Covers one pipeline stage, the first of those with most experts: Megatron divides only the first
model chunk of the first stage into buckets. Excludes biases of experts, and other parameters in the
buckets of bf16 experts where all ranks hold the same experts.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from moe_optim.commands.plan.buckets import (
    Bucket,
    Params,
    Shards,
    bucket_divisor,
    lay_buckets,
    lay_layer_wise_buckets,
    lay_matrix_buckets,
)
from moe_optim.commands.plan.flags import DTYPES, parse_flags, with_torch_dtypes
from moe_optim.commands.plan.stages import check_divides, count_moe_layers
from moe_optim.errors import ConfigError, refuse
from moe_optim.formats import BlockScaledFormat
from moe_optim.integration.arguments import extend_distributed_optimizer, ranks_multiple
from moe_optim.rules import OPTIMIZERS

WeightShape = tuple[int, int, int]
MOST_RANKS = 2**20
"""Limit far above any run; larger plans would take minutes."""


@dataclass(frozen=True, kw_only=True)
class PlannedExperts:
    """Expert weights of the pipeline stage with most of them."""

    args: argparse.Namespace
    weights: tuple[tuple[str, WeightShape], ...]
    """Name of each linear of one layer, and [experts, rows, columns] on one rank."""
    chunks: tuple[int, ...]
    """MoE layers of each model chunk of the stage."""
    stage: int
    grouped: bool
    """Whether all experts of a linear are one parameter."""
    in_te: bool
    """Whether quantized weights are Transformer Engine tensors; for flags that keep bf16, whether
    those that the plan proposes would be."""

    @property
    def layers(self) -> int:
        """Number of MoE layers of the stage."""
        return sum(self.chunks)

    @property
    def is_portable(self) -> bool:
        """Whether the modules are portable experts, not Transformer Engine's."""
        return bool(self.args.transformer_impl == "local")

    @property
    def optimizer(self) -> argparse.Namespace:
        """The flags as rules read them, with torch names of dtypes."""
        return with_torch_dtypes(self.args)

    @property
    def has_muon(self) -> bool:
        """Whether Muon steps the experts."""
        return bool(self.args.optimizer == "muon")

    @property
    def moment_bytes(self) -> int:
        """Bytes per element of both moments, or of Muon's momentum in fp32."""
        if self.has_muon:
            return 4
        kinds = self.args.exp_avg_dtype, self.args.exp_avg_sq_dtype
        return sum(DTYPES[kind][1] for kind in kinds)

    @property
    def grad_bytes(self) -> int:
        """Bytes per element of a gradient in the buffer, by ``validate_args``."""
        return 2 if self.args.grad_reduce_in_bf16 or self.args.main_grads_dtype == "bf16" else 4

    @property
    def gpus_multiple(self) -> int:
        """Divisor of every number of GPUs that the parallel sizes allow."""
        return ranks_multiple(self.args)

    def expert_dp_size(self, gpus: int) -> int:
        """Return the expert-data-parallel size; ConfigError for ``gpus`` that training refuses."""
        if gpus > MOST_RANKS:
            raise ConfigError(
                f"--gpus: expected at most {MOST_RANKS:,}, got {gpus}. Give fewer, or smaller "
                "parallel sizes after `--`."
            )
        if gpus < 1 or gpus % self.gpus_multiple:
            raise ConfigError(
                f"--gpus: expected multiples of {self.gpus_multiple}, which the parallel sizes in "
                f"megatron_args need, got {gpus}. Give another number, or change them after `--`."
            )
        args = self.args
        if fault := self.batch_fault(gpus):
            raise ConfigError(
                f"--gpus: expected a number of GPUs that Megatron can spread a batch over, got "
                f"{gpus}: {fault}. Give another number, or change the batch after `--`."
            )
        copy = _expert_tensor(args) * args.expert_model_parallel_size
        stages = args.pipeline_model_parallel_size * args.num_distributed_optimizer_instances
        return int(gpus // (copy * stages))

    def batch_fault(self, gpus: int) -> str | None:
        """Return why ``gpus`` do not divide a batch as Megatron requires; None if they do."""
        args = self.args
        model = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
        ranks = gpus // (model * args.context_parallel_size)
        size, micro = args.global_batch_size, args.micro_batch_size
        evaluated = args.eval_global_batch_size or size, args.eval_micro_batch_size or micro
        batches = {"--global-batch-size": (size, micro), "--eval-global-batch-size": evaluated}
        if args.decrease_batch_size_if_needed:
            del batches["--global-batch-size"]
        for flag, (size, micro) in batches.items():
            if size and micro and size % (micro * ranks):
                return (
                    f"{flag} {size} is not divisible by {ranks} data parallel ranks times "
                    f"{micro} samples of a micro batch"
                )
        return None

    def dense_dp_size(self, gpus: int) -> int:
        """Return how many ranks divide the states of a dense weight."""
        args = self.args
        copy = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
        return int(gpus // copy // args.num_distributed_optimizer_instances)

    def buckets(self, gpus: int, format: BlockScaledFormat | None = None) -> Counter[Bucket]:
        """Return bucket -> count on one rank; raises as above, or as ``lay_matrix_buckets``.

        ``format`` is that of weights that Muon steps, None for stock Megatron's. Adam's buckets are
        the same for all.
        """
        dp_size = self.expert_dp_size(gpus)
        high_busbw = self.args.ddp_pad_buckets_for_high_nccl_busbw
        divisor = bucket_divisor(dp_size, high_busbw=high_busbw)
        lay: Callable[[Params, Shards], Iterator[Bucket]] = lay_buckets
        if self.has_muon:
            of_format = partial(lay_matrix_buckets, format=format) if format else None
            lay = of_format or lay_layer_wise_buckets
        return Counter(
            bucket
            for params, full in self._chunks(gpus)
            for bucket in lay(params, Shards(full, dp_size, divisor))
        )

    def _chunks(self, gpus: int) -> Iterator[tuple[list[tuple[str, WeightShape]], int | None]]:
        """Yield parameters and bucket size of each model chunk; None for one bucket."""
        args = self.args
        dense_dp = gpus // (args.tensor_model_parallel_size * args.pipeline_model_parallel_size)
        # As resolve_ddp_bucket_size of Megatron's training
        full = args.ddp_bucket_size or max(40_000_000, 1_000_000 * dense_dp)
        for chunk, layers in enumerate(self.chunks):
            is_cut = chunk == 0 and self.stage == 0 and args.overlap_grad_reduce
            is_cut &= not args.overlap_param_gather_with_optimizer_step
            of_layer = [
                (name, shape if self.grouped else (1, *shape[1:]))
                for name, shape in self.weights
                for _ in range(1 if self.grouped else shape[0])
            ]
            yield of_layer * layers, full if is_cut else None


def is_native(args: argparse.Namespace) -> bool:
    """Return whether Transformer Engine modules hold the quantized weights."""
    return args.transformer_impl != "local" and bool(args.fp8_param_gather or args.fp4_param_gather)


def plan_experts(
    argv: Sequence[str], *, grouped: bool, stores_in_te: bool = False
) -> PlannedExperts:
    """Return the experts of a run with Megatron's flags; ConfigError for those not planned.

    ``grouped`` makes all experts of a linear one parameter; ``stores_in_te`` applies to portable
    experts.
    """
    args = parse_flags(argv)
    extend_distributed_optimizer(args)
    _require(args)
    _refuse(args)
    expert, cut = args.expert_model_parallel_size, _expert_tensor(args)
    ffn = args.moe_ffn_hidden_size or args.ffn_hidden_size
    check_divides("--num-experts", args.num_experts, "--expert-model-parallel-size", expert)
    check_divides("--moe-ffn-hidden-size", ffn, "--expert-tensor-parallel-size", cut)
    experts, rows, hidden = args.num_experts // expert, ffn // cut, args.hidden_size
    stages = count_moe_layers(args)
    stage = max(range(len(stages)), key=lambda index: sum(stages[index]))
    return PlannedExperts(
        args=args,
        weights=(
            ("experts.linear_fc1.weight", (experts, 2 * rows, hidden)),
            ("experts.linear_fc2.weight", (experts, hidden, rows)),
        ),
        chunks=stages[stage],
        stage=stage,
        grouped=grouped,
        in_te=args.transformer_impl != "local" or stores_in_te,
    )


def _expert_tensor(args: argparse.Namespace) -> int:
    return int(args.expert_tensor_parallel_size or args.tensor_model_parallel_size)


def _require(args: argparse.Namespace) -> None:
    needed = {
        "--num-layers": args.num_layers,
        "--hidden-size": args.hidden_size,
        "--num-experts": args.num_experts,
        "--moe-ffn-hidden-size": args.moe_ffn_hidden_size or args.ffn_hidden_size,
        "--bf16": args.bf16,
        "--swiglu or --quick-geglu": args.swiglu or args.quick_geglu,
        "--sequence-parallel with --tensor-model-parallel-size above 1": (
            args.sequence_parallel or args.tensor_model_parallel_size <= 1
        ),
    }
    for flag, value in needed.items():
        if not value:
            raise ConfigError(
                f"megatron_args: expected {flag}, got none. Add it to the recipe, or after `--`."
            )
    sizes = [name for name in vars(args) if name.endswith("_parallel_size")]
    for name in ("num_layers", "hidden_size", "num_experts", *sizes):
        if type(value := getattr(args, name)) is int and not 1 <= value <= MOST_RANKS:
            raise ConfigError(
                f"--{name.replace('_', '-')}: expected 1 to {MOST_RANKS:,}, got {value}. Correct "
                "the recipe."
            )


def _refuse(args: argparse.Namespace) -> None:
    """Raise ConfigError for flags that would change the numbers, or that experts do not support."""
    refused = {
        "--ddp-num-buckets, which counts other parameters too (use --ddp-bucket-size)": (
            args.ddp_num_buckets is not None
        ),
        "--heterogeneous-layers-config-*": (
            args.heterogeneous_layers_config_path is not None
            or args.heterogeneous_layers_config_encoded_json is not None
        ),
        "--hybrid-layer-pattern": args.hybrid_layer_pattern is not None,
        "--moe-latent-size": args.moe_latent_size is not None,
        "--mtp-use-repeated-layer": args.mtp_use_repeated_layer,
        f"--optimizer {args.optimizer} (use adam or muon)": args.optimizer not in OPTIMIZERS,
        "--use-megatron-fsdp": args.use_megatron_fsdp,
        "--use-torch-fsdp2": args.use_torch_fsdp2,
    }
    refuse(
        refused,
        expected="megatron_args: expected flags that a plan supports",
        remedy="Leave them out of the plan.",
    )
