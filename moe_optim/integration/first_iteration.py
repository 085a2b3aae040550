"""Predicts errors that Megatron raises only while building a model or in the first iteration.

Megatron's own builder builds a GPT on the meta device with fake process groups, so that its checks
run without allocation or communication. Errors of the first iteration are listed in a table here.
"""

import contextlib
import copy
import functools
import os
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from moe_optim.config import MoEOptimConfig
from moe_optim.integration.engine import apply_patches, revert_patches
from moe_optim.integration.installation import building_with
from moe_optim.integration.patches import EXPERTS
from moe_optim.rules import weight_shards

_HOLDER = "first iteration"
_SOFTMAX = "scaled_masked_softmax_cuda"

LayerSpec = Callable[..., Any]
"""Returns the spec of a pipeline stage, as ``GPTModelConfig.transformer_layer_spec`` does."""


def later_refusals(
    args: Any, model: Any, layer_spec: LayerSpec | None, config: MoEOptimConfig | None
) -> Iterator[Exception]:
    """Yield the errors of building a GPT and running one iteration.

    Skips models other than MoE GPTs. Builds nothing if the package that implements the layers is
    missing or a process group is initialized. ``layer_spec`` is as for a dry run.
    """
    if args.yaml_cfg is not None or args.hybrid_layer_pattern or not args.num_experts:
        return
    from megatron.core.extensions.transformer_engine import HAVE_TE

    has_layers = HAVE_TE or args.transformer_impl == "local"
    if has_layers and not dist.is_initialized():
        with contextlib.ExitStack() as stack:
            if config is not None:
                apply_patches(EXPERTS, _HOLDER)
                stack.callback(revert_patches, EXPERTS, _HOLDER)
                stack.enter_context(building_with(config))
            last = args.world_size - 1 if args.pipeline_model_parallel_size > 1 else args.rank
            for rank in dict.fromkeys((args.rank, last)):
                yield from _refusals_of_building(args, model, layer_spec, rank)
    for fault, is_there in _refused_in_iterations(args, model).items():
        if is_there:
            yield ValueError(fault)


def _refused_in_iterations(args: Any, model: Any) -> dict[str, bool]:
    """Return error message -> whether a forward pass with these arguments raises it."""
    from megatron.core.transformer.moe import moe_utils

    heads = args.micro_batch_size * model.num_attention_heads // args.tensor_model_parallel_size
    fuses_softmax = (  # as FusedScaleMaskSoftmax.is_kernel_available
        *(args.transformer_impl == "local", args.spec is None, model.masked_softmax_fusion),
        *(model.bf16 or model.fp16, 16 < args.seq_length <= 4096, args.seq_length % 4 == 0),
        heads % 4 == 0,
    )
    balancing = model.moe_router_load_balancing_type
    kinds = balancing if isinstance(balancing, list) else [balancing]
    coefficients = model.moe_aux_loss_coeff
    has_aux = any(coefficients) if isinstance(coefficients, list) else bool(coefficients)
    by_quantiles = "quantile_balancing" in kinds
    can_fuse = moe_utils.fused_topk_with_score_function is not None
    return {
        f"--moe-router-topk: expected at most --num-experts {model.num_moe_experts}, got "
        f"{model.moe_router_topk}": model.moe_router_topk > model.num_moe_experts,
        f"--num-query-groups: expected a divisor of --num-attention-heads "
        f"{model.num_attention_heads}, got {model.num_query_groups}": (
            model.num_attention_heads % model.num_query_groups != 0
        ),
        "--masked-softmax-fusion, Megatron's default, needs its CUDA extension "
        f"{_SOFTMAX}, which is not installed. Add --no-masked-softmax-fusion": (
            all(fuses_softmax) and find_spec(_SOFTMAX) is None
        ),
        "--moe-router-fusion takes Transformer Engine 2.6 or newer": (
            model.moe_router_fusion and not can_fuse
        ),
        "MoE layers with --tensor-model-parallel-size above 1 train with sequence parallelism "
        "alone. Add --sequence-parallel": (
            args.tensor_model_parallel_size > 1 and not model.sequence_parallel
        ),
        "--moe-router-load-balancing-type sinkhorn takes no --moe-aux-loss-coeff": (
            "sinkhorn" in kinds and has_aux
        ),
        "--moe-router-load-balancing-type quantile_balancing takes no --moe-router-fusion": (
            by_quantiles and model.moe_router_fusion
        ),
        "--moe-router-load-balancing-type quantile_balancing takes no --moe-router-num-groups": (
            by_quantiles and model.moe_router_num_groups is not None
        ),
    } | {
        f"--num-layers-per-virtual-pipeline-stage, or --num-virtual-stages-per-pipeline-rank: "
        f"expected a multiple of {group} micro-batches per step and rank, or a rest of at least "
        f"{args.pipeline_model_parallel_size}, got {count} ({of})": True
        for of, count, group in _short_groups(args, model)
    }


def _short_groups(args: Any, model: Any) -> Iterator[tuple[str, int, int]]:
    """Yield flag, micro-batches and group size that an interleaved schedule refuses."""
    stages, group = args.pipeline_model_parallel_size, model.microbatch_group_size_per_vp_stage
    if args.virtual_pipeline_model_parallel_size is None:
        return
    per_rank = args.micro_batch_size * args.data_parallel_size
    sizes = {"--global-batch-size": args.global_batch_size // per_rank}
    if args.rampup_batch_size:
        sizes["--rampup-batch-size"] = int(args.rampup_batch_size[0]) // per_rank
    for of, count in sizes.items():
        if group > count or 0 < count % group < stages:
            yield of, count, group


def schedule_refusals(args: Any) -> list[Exception]:
    """Return the errors of the learning rate schedule, if rate and length are given."""
    from megatron.training import global_vars
    from megatron.training.training import get_optimizer_param_scheduler

    before, global_vars._GLOBAL_ARGS = global_vars._GLOBAL_ARGS, Namespace(**vars(args))
    try:
        is_given = args.lr is not None and (args.train_iters or args.train_samples)
        if args.yaml_cfg is None and is_given:
            get_optimizer_param_scheduler(SimpleNamespace(param_groups=[]))
    except Exception as error:
        return [error]
    finally:
        global_vars._GLOBAL_ARGS = before
    return []


def _refusals_of_building(
    args: Any, model: Any, layer_spec: LayerSpec | None, rank: int
) -> list[Exception]:
    """Return the errors of one rank: the first of the model, and of its last MLP."""
    refusals: list[Exception] = []
    try:
        with _alone(args, rank), _OnMeta(), torch.device("meta"):
            for attempts in _builders(args, model, layer_spec):
                for build in attempts:
                    try:
                        build()
                        break
                    except Exception as error:
                        refusals.append(error)
    except Exception as error:  # inconsistent sizes, or not a GPT
        refusals.append(error)
    return [error for error in refusals if not _is_of_meta(error)]


def _builders(
    args: Any, model: Any, layer_spec: LayerSpec | None
) -> Iterator[tuple[Callable[[], Any], ...]]:
    """Yield for each model chunk a function that builds it, and one that builds its last MLP."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.models.gpt import GPTModelBuilder, default_layer_spec

    model = copy.copy(model)
    model.perform_initialization = False
    model.init_model_with_meta_device = True
    config = gpt_config_from_args(_with_vocabulary(args), model)
    is_of_block = config.transformer_layer_spec is None
    if is_of_block:
        config.transformer_layer_spec = layer_spec or default_layer_spec
    groups = ProcessGroupCollection.use_mpu_process_groups()

    def build_mlp(stage: int | None) -> None:
        spec = config.transformer_layer_spec(config, stage)
        *_, layer = getattr(spec, "layer_specs", None) or [spec]
        layer.submodules.mlp(config=model, pg_collection=groups, is_mtp_layer=False)

    for chunk in range(args.virtual_pipeline_model_parallel_size or 1):
        stage = chunk if args.virtual_pipeline_model_parallel_size else None
        build = functools.partial(GPTModelBuilder(config).build_model, groups, vp_stage=stage)
        yield (build, functools.partial(build_mlp, stage)) if is_of_block else (build,)


@contextlib.contextmanager
def _alone(args: Any, rank: int) -> Iterator[None]:
    """Make this process one rank of the world described by ``args``, over fake process groups."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random
    from torch.testing._internal.distributed.fake_pg import FakeStore

    names, sizes = ("gtp_remat_size", "expert_gtp_remat_size"), weight_shards(args)
    shards = dict(zip(names, sizes, strict=True)) if max(sizes) > 1 else {}
    environment = dict(os.environ)
    tracker = random._CUDA_RNG_STATE_TRACKER, random._CUDA_RNG_STATE_TRACKER_INITIALIZED
    dist.init_process_group("fake", rank=rank, world_size=args.world_size, store=FakeStore())
    try:
        parallel_state.initialize_model_parallel(
            args.tensor_model_parallel_size,
            args.pipeline_model_parallel_size,
            args.virtual_pipeline_model_parallel_size,
            context_parallel_size=args.context_parallel_size,
            hierarchical_context_parallel_sizes=args.hierarchical_context_parallel_sizes,
            expert_model_parallel_size=args.expert_model_parallel_size,
            expert_tensor_parallel_size=args.expert_tensor_parallel_size,
            num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
            **shards,
            order="tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
            create_gloo_process_groups=False,
        )
        random.initialize_rng_tracker(
            args.te_rng_tracker,
            args.inference_rng_tracker,
            use_cudagraphable_rng=args.cuda_graph_impl != "none",
            force_reset=True,
        )
        yield
    finally:
        random._CUDA_RNG_STATE_TRACKER, random._CUDA_RNG_STATE_TRACKER_INITIALIZED = tracker
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        for name in os.environ.keys() - environment.keys():  # set by attention layers
            del os.environ[name]
        os.environ.update(environment)


class _OnMeta(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.Tensor.cuda, torch.Tensor.cpu):
            return args[0]
        if kwargs.get("device") is not None:
            kwargs["device"] = "meta"
        if func is torch.Tensor.to:
            kinds = str, int, torch.device
            args = (args[0], *("meta" if type(one) in kinds else one for one in args[1:]))
        return func(*args, **kwargs)


def _is_of_meta(error: Exception) -> bool:
    """Return whether an error is an artifact of meta tensors, which have no values."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    in_torch = any(frame.f_code is _OnMeta.__torch_function__.__code__ for frame in frames)
    module: str = frames[-1].f_globals.get("__name__", "")
    return in_torch or module.partition(".")[0] == "transformer_engine"


def _with_vocabulary(args: Any) -> Namespace:
    """Return a copy of ``args`` with a vocabulary size, even if only the tokenizer defines it."""
    size = args.padded_vocab_size or args.vocab_size
    padded = args.padded_vocab_size or (None if size else 128 * args.tensor_model_parallel_size)
    return Namespace(**vars(args) | {"padded_vocab_size": padded})
