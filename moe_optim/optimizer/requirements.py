"""What the plug-in asks of Megatron's configuration, checked when the optimizer is built."""

import logging
from collections.abc import Sequence
from typing import Any, get_args

import torch
import torch.distributed as dist
from megatron.core.distributed import param_and_grad_buffer as upstream
from megatron.core.utils import log_single_rank

from moe_optim.buckets.bucket_group import GroupedBucketGroup, bucket_groups
from moe_optim.config import MEGATRONS_RECIPES, NATIVE_FORMATS, Format, MoEOptimConfig
from moe_optim.errors import ConfigError, StateError, refuse
from moe_optim.experts.grouped_linear import GroupedLinear
from moe_optim.experts.module import unsupported_features
from moe_optim.integration.patching.active import config_in_force, installed_config
from moe_optim.integration.patching.planning import (
    has_masters_of_adam,
    knobs_with_flags,
    settings_of_stocks_step,
)
from moe_optim.weights.managed import is_managed
from moe_optim.weights.te.fields import TENSORWISE, is_tensorwise, te_formats_of
from moe_optim.weights.te.recipe import native_recipe, variables_of_other_bytes

logger = logging.getLogger(__name__)
_TENSORWISE = "weights with one scale (--fp8-recipe tensorwise)"


def check_wrapped_model(config: Any, model_chunks: list[Any]) -> None:
    """Refuse what would train wrongly.

    Args:
        config: Megatron's ``OptimizerConfig``.
        model_chunks: DDP-wrapped chunks.

    Raises:
        ConfigError: naming every flag that is not supported.
        StateError: quantized weights in buffers the plug-in did not make.
    """
    params = [param for chunk in model_chunks for param in chunk.parameters()]
    quantized = any(is_managed(param) for param in params)
    tensorwise = any(is_tensorwise(param) for param in params)
    refuse(
        _refused_settings(
            config,
            model_chunks[0].ddp_config,
            [chunk.config for chunk in model_chunks],
            config_in_force(),
            quantized=quantized,
            tensorwise=tensorwise,
        ),
        expected="moe_optim: expected flags it supports",
        remedy="Remove them, or train without --use-moe-grouped-optim.",
    )
    if (wanted := installed_config()) is not None:
        _check_wanted(wanted, model_chunks, quantized=quantized, tensorwise=tensorwise)
    if quantized:
        _check_buffers(model_chunks)
    _refuse_foreign_quantized(params)


def foresee_refusals(
    config: Any, ddp_config: Any, model_configs: Sequence[Any], knobs: MoEOptimConfig
) -> list[str]:
    """Return all that would be refused once the model is built, as flags; empty if nothing is.

    Nothing is built, installed or raised: configurations alone are read, after Megatron has settled
    them. What depends on shapes is not foreseen.

    Args:
        config: Megatron's ``OptimizerConfig``.
        ddp_config: its ``DistributedDataParallelConfig``.
        model_configs: the ``TransformerConfig`` of every chunk.
        knobs: what would be installed.
    """
    recipes = dict.fromkeys(recipe for model in model_configs if (recipe := native_recipe(model)))
    portable = [model for model in model_configs if _asks_for_portable_experts(model)]
    left = [flag for flag in recipes if flag in MEGATRONS_RECIPES]
    quantized = len(recipes) > len(left) or (bool(portable) and knobs.format != "bf16")
    is_named = knobs.format not in ("auto", "bf16")
    refused = _refused_settings(
        config, ddp_config, model_configs, knobs, quantized=quantized, tensorwise=bool(left)
    )
    for flag in recipes:
        formats = ("auto",) if flag in left else NATIVE_FORMATS.get(flag, ())
        refused[f"{flag} with weights kept in it (drop the native parameter gather)"] = not formats
        refused[f"moe_optim.format {knobs.format} with {flag} (give {' or '.join(formats)})"] = (
            bool(formats) and knobs.format not in ("auto", *formats)
        )
        for variable in variables_of_other_bytes(flag):
            refused[f"{variable} with {flag} (unset it)"] = True
    refused[
        f"moe_optim.format {knobs.format} without weights to keep in it (give --moe-grouped-gemm "
        "with --transformer-impl local, or a recipe and native parameter gather of Transformer "
        "Engine; or set format: bf16)"
    ] = is_named and not (quantized or left)
    refused |= _refused_steps(config, knobs, quantized=quantized or bool(left))
    refused[f"moe_optim.compute {knobs.compute} without portable experts"] = (
        knobs.compute not in (None, "bf16") and not portable
    )
    for model in portable:
        size = model.expert_tensor_parallel_size or model.tensor_model_parallel_size
        refused |= unsupported_features(model, tensor_parallel=size, compute=knobs.compute)
    return [setting for setting, is_refused in refused.items() if is_refused]


def _refused_steps(config: Any, knobs: MoEOptimConfig, *, quantized: bool) -> dict[str, bool]:
    """Return what does not go with the step that is asked for -> whether it is there."""
    of_adam = has_masters_of_adam(config, knobs, quantized=quantized)
    settings = settings_of_stocks_step(config, masters_of_adam=of_adam)
    on_host = knobs_with_flags(knobs, config).offload_states
    asked = "--optimizer-cpu-offload"
    if not config.optimizer_cpu_offload:
        asked = f"moe_optim.offload_states {on_host}"
    refused = {
        f"moe_optim.step fused with {setting} (set step: auto)": knobs.step == "fused" and there
        for setting, there in settings.items()
    }
    found = next((setting for setting, there in settings.items() if there), None)
    remedy = "set step: fused" if found is None else f"remove {found}"
    takes_stocks = not knobs.may_fuse_steps or found is not None
    return refused | {
        "--optimizer-cuda-graph without a fused step (see step in the knobs)": (
            config.optimizer_cuda_graph and takes_stocks
        ),
        f"{asked} without a fused step ({remedy})": bool(on_host) and takes_stocks,
    }


def _asks_for_portable_experts(model: Any) -> bool:
    return bool(
        model.transformer_impl == "local" and model.num_moe_experts and model.moe_grouped_gemm
    )


def _refused_settings(
    config: Any,
    ddp_config: Any,
    model_configs: Sequence[Any],
    knobs: MoEOptimConfig,
    *,
    quantized: bool,
    tensorwise: bool,
) -> dict[str, bool]:
    """Return every flag that is not supported -> whether these configurations have it.

    Args:
        config: Megatron's ``OptimizerConfig``.
        ddp_config: its ``DistributedDataParallelConfig``.
        model_configs: the ``TransformerConfig`` of every chunk.
        knobs: what is, or would be, installed.
        quantized: whether some weights are, and are managed.
        tensorwise: whether some have one scale each.
    """
    refused = {
        "--use-megatron-fsdp": ddp_config.use_megatron_fsdp,
        "an optimizer without --use-distributed-optimizer": (
            config.optimizer == "adam" and not config.use_distributed_optimizer  # Muon takes it off
        ),
        f"--optimizer {config.optimizer} (give adam)": config.optimizer != "adam",
        "--optimizer-cpu-offload with moe_optim.step stock (set step: fused)": (
            config.optimizer_cpu_offload and knobs.step == "stock"
        ),
        "--optimizer-cpu-offload without --bf16 (fp32 weights are their own masters)": (
            config.optimizer_cpu_offload and not (config.bf16 or config.fp16)
        ),
        "--overlap-param-gather-with-optimizer-step": (
            config.overlap_param_gather_with_optimizer_step
        ),
        "--qk-clip (Megatron rescales masters as if none were sharded)": any(
            model.qk_clip for model in model_configs
        ),
    }
    if quantized:
        refused |= {
            "--fp16 (give --bf16)": config.fp16,
            # gathers of theirs have memory that NCCL has not registered
            "--use-nccl-ub with quantized weights": ddp_config.nccl_ub,
            f"--main-params-dtype {_spelt(config.main_params_dtype)} (quantized weights are made "
            "of fp32 masters; give fp32)": (
                config.use_precision_aware_optimizer and config.main_params_dtype != torch.float32
            ),
            # what such shards hold is gathered for every product by another path, and neither
            # scales of whole weights nor recorded amaxes are those of a shard
            "--tensor-parallel-num-weight-shards above --tensor-model-parallel-size": any(
                model.gtp_weight_remat_size > 1 for model in model_configs
            ),
            "--expert-tensor-parallel-num-weight-shards above --expert-tensor-parallel-size": any(
                model.expert_gtp_weight_remat_size > 1 for model in model_configs
            ),
        }
    if tensorwise:
        refused |= {
            # ranks reduce amaxes in the middle of the step; in a graph that was not tried
            f"--optimizer-cuda-graph with {_TENSORWISE}": config.optimizer_cuda_graph,
            f"moe_optim.record_amax with {_TENSORWISE}": knobs.record_amax,
            # their gathers are Megatron's, which shares that memory for MXFP8 alone
            f"--reuse-grad-buf-for-mxfp8-param-ag with {_TENSORWISE}": (
                ddp_config.reuse_grad_buf_for_mxfp8_param_ag
            ),
            # the cast would read masters of the host twice, over the link
            f"moe_optim.offload_states, or --optimizer-cpu-offload, with {_TENSORWISE}": bool(
                config.optimizer_cpu_offload or knobs.offload_states
            ),
        }
    return refused


def _spelt(dtype: torch.dtype) -> str:
    """Return a dtype as Megatron's flags spell it."""
    return {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}.get(dtype, "fp8")


def _check_wanted(
    wanted: MoEOptimConfig, model_chunks: list[Any], *, quantized: bool, tensorwise: bool
) -> None:
    """Refuse a bf16 model where experts stored or multiplied in a narrow format are wanted.

    And, where any format is named, weights that ``auto`` alone leaves to Megatron. Every rank must
    call it: some pipeline stages may have no experts where others do.
    """
    if wanted.format == "auto":
        _say_format(wanted, model_chunks)
        return
    if any(_on_any_rank(tensorwise)):
        raise _wrong_format(["auto"], wanted.format)
    if wanted.format != "bf16":
        field, off, has_some = "format", "bf16", quantized
    elif wanted.compute not in (None, "bf16"):
        field, off, has_some = "compute", "null", _has_quantized_copies(model_chunks)
    else:
        return
    if any(_on_any_rank(has_some)):
        return
    raise ConfigError(
        f"moe_optim: {field}: expected portable experts in {wanted.compute or wanted.format}, "
        "got a model without any. Give --moe-grouped-gemm and --transformer-impl local (a "
        "checkpoint read with --use-checkpoint-args may take them back), or set "
        f"{field}: {off}."
    )


def _say_format(wanted: MoEOptimConfig, model_chunks: list[Any]) -> None:
    """Log what ``format: auto`` is in this model, and refuse knobs that do not go with it.

    Raises:
        ConfigError: such a knob, or weights in several formats.
    """
    params = [param for chunk in model_chunks for param in chunk.parameters()]
    mine = {param.quantized_storage.format.name for param in params if is_managed(param)}
    mine |= {TENSORWISE for param in params if is_tensorwise(param)}
    names: tuple[str, ...] = (*get_args(Format), TENSORWISE)
    there = _on_any_rank(*(name in mine for name in names))
    found = [name for name, is_there in zip(names, there, strict=True) if is_there] or ["bf16"]
    if len(found) > 1:
        raise ConfigError(
            f"moe_optim: format: auto: expected quantized weights of one format, got "
            f"{' and '.join(found)}. Build all of them with one recipe."
        )
    what = f"is {found[0]} here"
    if found == [TENSORWISE]:
        wanted.resolved("bf16")  # what is left to Megatron records no amax, either
        what = f"leaves {TENSORWISE} weights in Megatron's buffers"
    else:
        wanted.resolved(found[0])
    log_single_rank(logger, logging.INFO, f"moe_optim: format: auto {what}")


def _on_any_rank(*mine: bool) -> list[bool]:
    """Return of each truth whether it is one on any rank."""
    if not dist.is_initialized():
        return list(mine)
    found = torch.tensor(mine, dtype=torch.float32, device=torch.cuda.current_device())
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return [bool(value) for value in found.tolist()]


def _has_quantized_copies(model_chunks: list[Any]) -> bool:
    return any(
        isinstance(module, GroupedLinear) and module.quantized_copy is not None
        for chunk in model_chunks
        for module in chunk.modules()
    )


def _check_buffers(model_chunks: list[Any]) -> None:
    for group in bucket_groups(model_chunks):
        holds = any(is_managed(param) for param in group.params)
        if holds and not (isinstance(group, GroupedBucketGroup) and group.managed):
            raise StateError(
                "moe_optim: quantized experts lie in buffers of Megatron's own class. Call "
                "moe_optim.install() before the model is wrapped with DDP."
            )


def _refuse_foreign_quantized(params: list[Any]) -> None:
    for param in params:
        if is_managed(param) or not upstream._param_uses_quantized_storage(param):
            continue
        wanted = config_in_force().format
        if is_tensorwise(param):
            if wanted == "auto":
                continue
            known = ["auto"]
        else:
            known = [format.name for format in te_formats_of(param)]
        if known:
            raise _wrong_format(known, wanted)
        raise ConfigError(
            "moe_optim: expected portable or bf16 weights, or MXFP8, NVFP4 or FP8 blocks of "
            "Transformer Engine, or its FP8 with current scaling, got "
            f"{type(param).__name__} of shape {list(param.shape)}. Build with --transformer-impl "
            "local, or drop --fp8-param-gather / --fp4-param-gather."
        )


def _wrong_format(known: list[str], got: str) -> ConfigError:
    """Return the error of native weights that are in none of a knob's formats."""
    return ConfigError(
        f"moe_optim: format: expected {' or '.join(known)}, as --fp8-recipe or --fp4-recipe makes "
        f"the weights here, got {got}. Set --moe-optim-set format={known[0]}, or drop "
        "--fp8-param-gather or --fp4-param-gather."
    )
