"""The expert weights of a run that is not there: shapes, ranks and buckets from Megatron's flags.

One pipeline stage is planned, the one with most experts, and of several such stages the first:
Megatron cuts only the first model chunk of the first stage into buckets. The experts are planned
alone. Their biases are left out, and so is what else Megatron puts into the buckets of bf16 experts
where all ranks hold the same ones.
"""

import argparse
import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.param_layout import bucket_end_divisor
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.training.arguments import add_megatron_arguments

from moe_optim.errors import ConfigError, refuse
from moe_optim.formats import BlockScaledFormat
from moe_optim.layout.aligned import BucketEnd, aligned_end
from moe_optim.layout.wire import Slot

Shape = tuple[int, int, int]
_MOMENTS = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.uint8,
}
"""Dtypes of moments, as the flags of precision-aware optimizers spell them."""


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
    exp_avg_dtype: torch.dtype
    exp_avg_sq_dtype: torch.dtype
    fp16: bool
    loss_scale: float | None
    """This and the three before it are of Megatron's ``OptimizerConfig``."""
    grouped: bool
    """Whether all experts of a linear are one parameter."""
    grad_dtype: torch.dtype
    bucket_size: int | None
    """``--ddp-bucket-size``; None takes Megatron's rule."""
    overlap_grad_reduce: bool
    high_busbw: bool

    @property
    def moment_bytes(self) -> int:
        """What both moments of an element take."""
        return self.exp_avg_dtype.itemsize + self.exp_avg_sq_dtype.itemsize

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
        params = [param for _ in range(layers) for param in self._params_of_layer()]
        config = SimpleNamespace(pad_buckets_for_high_nccl_busbw=self.high_busbw)
        layout = DistributedOptimizer._compute_per_buffer_param_layout(
            params, bucket_size, dp_size, config
        )
        slots: list[list[Slot]] = [[] for _ in layout.bucket_indices]
        for param, (start, _, bucket) in layout.param_index_map.items():
            first = layout.bucket_indices[bucket][0]
            slots[bucket].append(Slot(name=param.name, start=start - first, shape=param.shape))
        divisor = bucket_end_divisor(dp_size, self.high_busbw)
        return Counter(
            PlannedBucket(
                slots=tuple(inside), dp_size=dp_size, stock_numel=end - first, divisor=divisor
            )
            for inside, (first, end) in zip(slots, layout.bucket_indices, strict=True)
        )

    def _params_of_layer(self) -> "list[_Parameter]":
        return [
            _Parameter(name=name, shape=shape if self.grouped else (1, *shape[1:]))
            for name, shape in self.weights
            for _ in range(1 if self.grouped else shape[0])
        ]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Parameter:
    """What Megatron's layout reads of a parameter."""

    name: str
    shape: Shape

    @property
    def data(self) -> "_Parameter":
        return self

    def nelement(self) -> int:
        return self.shape[0] * self.shape[1] * self.shape[2]


class _Parser(argparse.ArgumentParser):
    """Raises what argparse would end the process with."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"megatron_args: expected flags that Megatron takes, got: {message}.")


def plan_experts(argv: Sequence[str], *, grouped: bool) -> PlannedExperts:
    """Read what a run with these flags would hold; nothing is built, and no GPU is needed.

    Args:
        argv: Megatron's flags.
        grouped: whether all experts of a linear are one parameter.

    Raises:
        ConfigError: naming the flag that is missing, that does not fit the others, or whose effect
            is not planned.
    """
    args = _parse(argv)
    _require(args)
    _refuse(args)
    _check_counts(args)
    tensor, pipeline = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    expert, context = args.expert_model_parallel_size, args.context_parallel_size
    expert_tensor = args.expert_tensor_parallel_size or tensor
    ffn = args.moe_ffn_hidden_size or args.ffn_hidden_size
    _check_divides("--num-experts", args.num_experts, "--expert-model-parallel-size", expert)
    _check_divides("--moe-ffn-hidden-size", ffn, "--expert-tensor-parallel-size", expert_tensor)
    experts, rows, hidden = args.num_experts // expert, ffn // expert_tensor, args.hidden_size
    stages = _moe_layers(args)
    stage = max(range(pipeline), key=lambda index: sum(stages[index]))
    instances = args.num_distributed_optimizer_instances
    dense, whole = tensor * pipeline, expert_tensor * expert * pipeline
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
        exp_avg_dtype=_MOMENTS[args.exp_avg_dtype],
        exp_avg_sq_dtype=_MOMENTS[args.exp_avg_sq_dtype],
        fp16=args.fp16,
        loss_scale=args.loss_scale,
        grouped=grouped,
        grad_dtype=torch.bfloat16 if args.grad_reduce_in_bf16 else torch.float32,
        bucket_size=args.ddp_bucket_size,
        overlap_grad_reduce=args.overlap_grad_reduce,
        high_busbw=args.ddp_pad_buckets_for_high_nccl_busbw,
    )


def ranks_multiple(args: argparse.Namespace) -> int:
    """Return what the number of ranks must be a multiple of, for parsed flags of Megatron."""
    dense = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    expert_tensor = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    whole = expert_tensor * args.expert_model_parallel_size * args.pipeline_model_parallel_size
    instances = args.num_distributed_optimizer_instances
    return lcm(dense * args.context_parallel_size, dense * instances, whole * instances)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    try:
        return _parser().parse_args(list(argv))
    except AssertionError as error:  # from functions of Megatron that read one value
        raise ConfigError(
            f"megatron_args: expected values that Megatron takes, got: {error}."
        ) from error


@functools.cache
def _parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = add_megatron_arguments(_Parser(allow_abbrev=False))
    return parser


def _require(args: argparse.Namespace) -> None:
    """Raise ConfigError for the first flag without which there is nothing to plan."""
    needed: dict[str, Any] = {
        "--num-layers": args.num_layers,
        "--hidden-size": args.hidden_size,
        "--num-experts": args.num_experts,
        "--moe-ffn-hidden-size": args.moe_ffn_hidden_size or args.ffn_hidden_size,
        "--bf16": args.bf16,
        "--use-distributed-optimizer": args.use_distributed_optimizer,
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
    """Raise ConfigError for a size below 1, of which nothing can be made."""
    for name in (
        "num_layers",
        "hidden_size",
        "num_experts",
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "num_distributed_optimizer_instances",
        "num_layers_per_virtual_pipeline_stage",
        "num_virtual_stages_per_pipeline_rank",
    ):
        value = getattr(args, name)
        if value is not None and value < 1:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag}: expected 1 or more, got {value}. Correct the recipe.")


def _check_divides(whole: str, number: int, part: str, divisor: int) -> None:
    if number % divisor:
        raise ConfigError(
            f"megatron_args: expected {part} to divide {whole} {number}, got {divisor}. Change one "
            "of the two."
        )


def _moe_layers(args: argparse.Namespace) -> list[tuple[int, ...]]:
    """Return how many MoE layers each model chunk of each pipeline stage has.

    A layer that predicts a further token is as the last layer is.
    """
    pattern = _moe_pattern(args.moe_layer_freq, args.num_layers)
    further = pattern[-1] * (args.mtp_num_layers or 0)
    if args.pipeline_model_parallel_layout is not None:
        return _moe_layers_laid_out(args, pattern)
    *stages, (*chunks, last) = _even_moe_layers(args, pattern)
    return [*stages, (*chunks, last + further)]


def _moe_layers_laid_out(args: argparse.Namespace, pattern: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the same where ``--pipeline-model-parallel-layout`` says which layer is where."""
    pipeline, text = args.pipeline_model_parallel_size, args.pipeline_model_parallel_layout
    try:
        layout = PipelineParallelLayerLayout(text, pipeline)
        layout.validate_layer_layout(args.num_layers, args.mtp_num_layers or 0)
    except (AssertionError, ValueError) as error:
        raise ConfigError(
            f"--pipeline-model-parallel-layout {text}: expected one that Megatron takes, got: "
            f"{error}. Correct it."
        ) from error
    experts = iter(pattern)  # layers are numbered chunk by chunk, and in a chunk by stage
    found: list[list[int]] = [[] for _ in range(pipeline)]
    for chunk in zip(*layout.layout, strict=True):
        for stage, kinds in enumerate(chunk):
            own = sum(next(experts) for kind in kinds if kind is LayerType.decoder)
            found[stage].append(own + pattern[-1] * kinds.count(LayerType.mtp))
    return [tuple(chunks) for chunks in found]


def _even_moe_layers(args: argparse.Namespace, pattern: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the same of the decoder where Megatron cuts it."""
    pipeline, virtual = args.pipeline_model_parallel_size, _virtual_stages(args)
    config: Any = SimpleNamespace(
        num_layers=args.num_layers,
        pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        pipeline_model_parallel_layout=None,
        num_layers_in_first_pipeline_stage=args.decoder_first_pipeline_num_layers,
        num_layers_in_last_pipeline_stage=args.decoder_last_pipeline_num_layers,
        account_for_embedding_in_pipeline_split=args.account_for_embedding_in_pipeline_split,
        account_for_loss_in_pipeline_split=args.account_for_loss_in_pipeline_split,
    )
    try:
        return [
            tuple(_count(pattern, config, chunk, stage) for chunk in range(virtual))
            for stage in range(pipeline)
        ]
    except AssertionError as error:
        raise ConfigError(
            f"--pipeline-model-parallel-size {pipeline}: expected stages that Megatron can fill "
            f"with --num-layers {args.num_layers}, got: {error}. Change one of the two."
        ) from error


def _virtual_stages(args: argparse.Namespace) -> int:
    """Return the model chunks of a stage."""
    pipeline = args.pipeline_model_parallel_size
    virtual: int = args.num_virtual_stages_per_pipeline_rank or 1
    flag = "--num-virtual-stages-per-pipeline-rank"
    if args.num_layers_per_virtual_pipeline_stage is not None:
        flag, layers = "--num-layers-per-virtual-pipeline-stage", args.num_layers
        layers += args.account_for_embedding_in_pipeline_split
        layers += args.account_for_loss_in_pipeline_split
        chunk = args.num_layers_per_virtual_pipeline_stage
        _check_divides("the layers of a pipeline stage,", layers // pipeline, flag, chunk)
        virtual = layers // pipeline // chunk
    if virtual > 1 and pipeline == 1:
        raise ConfigError(
            f"{flag}: expected --pipeline-model-parallel-size above 1, got 1. Remove the flag."
        )
    return virtual


def _count(pattern: Sequence[int], config: Any, chunk: int, stage: int) -> int:
    index = chunk if config.virtual_pipeline_model_parallel_size else None
    first = get_transformer_layer_offset(config, index, stage)
    return sum(pattern[first : first + get_num_layers_to_build(config, index, stage)])


def _moe_pattern(freq: int | list[int], num_layers: int) -> list[int]:
    """Return 1 for every layer with experts and 0 for every other, by ``--moe-layer-freq``."""
    if isinstance(freq, int):
        if freq < 1:
            raise ConfigError(f"--moe-layer-freq: expected 1 or more, got {freq}. Correct it.")
        return [int(layer % freq == 0) for layer in range(num_layers)]
    if len(freq) != num_layers:
        raise ConfigError(
            f"--moe-layer-freq: expected a pattern of --num-layers {num_layers}, got {len(freq)} "
            "layers. Change one of the two."
        )
    if not any(freq):
        raise ConfigError("--moe-layer-freq: expected a layer with experts, got none. Correct it.")
    return list(freq)
