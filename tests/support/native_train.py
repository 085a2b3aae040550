"""One rank of a run whose experts are Transformer Engine's modules, with kernels in torch.

``torchrun --nproc-per-node N -m tests.support.native_train FOLDER FORMAT KNOBS [MEGATRON FLAGS]``;
KNOBS are JSON. Beside the plug-in's they may have ``single_grouped_weight``, and ``given``: with
"before" other values are loaded into the model before it is wrapped, with "after" when there is an
optimizer, which then makes its masters of the weights; and ``offloaded``: weights leave the device
and come back, and masters move, after the first step; and ``recipe``, a list of a recipe and what
is to be put in it, whose flags and knobs take the place of all others. Writes
``FOLDER/rank<i>.pt``: losses, and of every weight what products read of it and its amaxes beside
its assembled master. On a CPU as on a GPU.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from moe_optim import MoEOptimConfig
from moe_optim.formats import get_format
from moe_optim.recipes import load_recipe
from tests.support import given_values, making_room
from tests.support.native_products import replace_kernels

RECIPES = {
    "mxfp8": "--fp8-format e4m3 --fp8-recipe mxfp8 --fp8-param-gather",
    "mxfp8_2d": "--fp8-format e4m3 --fp8-recipe mxfp8 --fp8-param-gather",
    "fp8_block": "--fp8-format e4m3 --fp8-recipe blockwise --fp8-param-gather",
    "nvfp4": "--fp4-format e2m1 --fp4-recipe nvfp4 --fp4-param-gather",
}


def main(folder: str, format: str, knobs: str, *flags: str) -> None:
    """Train, and write what this rank saw."""
    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        _leave_to_torch()
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
    from megatron.core.models.backends import LocalSpecProvider

    from moe_optim.megatron import installation
    from tests.support import training

    if on_cpu:
        from moe_optim.megatron.launch import cpu_runtime

        cpu_runtime.install()
        _EveryTensorIsOnTheGpu().__enter__()
    chosen = json.loads(knobs)
    single = chosen.pop("single_grouped_weight", False)
    when = chosen.pop("given", None)
    is_offloaded = chosen.pop("offloaded", False)
    recipe = chosen.pop("recipe", None)
    config = MoEOptimConfig(**({"format": format} | chosen))
    quantized = RECIPES[format].split()
    if recipe is not None:
        path, *overrides = recipe
        read = load_recipe(path, overrides)
        training.MODEL[:], config, quantized = read.megatron_argv(), read.moe_optim, []
    installation.install(config)
    replace_kernels(get_format(format))

    def grouped_mlp_modules(_provider: Any, use_grouped_gemm: bool) -> Any:
        build = TESpecProvider().grouped_mlp_modules(use_grouped_gemm)

        def experts(count: int, config: Any, **kwargs: Any) -> Any:
            # set here: Megatron's configuration wants its op fuser, which wants a Blackwell
            config.moe_single_grouped_weight = single
            return build(count, config, **kwargs)

        return experts

    LocalSpecProvider.grouped_mlp_modules = grouped_mlp_modules
    if when == "before":
        given_values.when_built(given_values.load)
    record = training.pretrain(
        [*quantized, *flags],
        config,
        observe=_describe,
        after_setup=_load_and_make_masters if when == "after" else None,
        after_step=_offload_once if is_offloaded else None,
    )
    torch.save(
        {"losses": record.losses, "weights": record.extra},
        Path(folder) / f"rank{os.environ['RANK']}.pt",
    )


class _EveryTensorIsOnTheGpu(TorchFunctionMode):
    """Says so to Transformer Engine's modules, which ask before they begin."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.is_cuda.__get__:
            return True
        return func(*args, **(kwargs or {}))


def _leave_to_torch() -> None:
    """Transformer Engine is here, and what it has for Adam, norms and routers needs a GPU."""
    from megatron.core import optimizer, utils
    from megatron.core.optimizer import clip_grads
    from megatron.core.transformer.moe import moe_utils

    from moe_optim.megatron.patching import patches
    from moe_optim.megatron.patching.engine import apply_patches

    moe_utils.te_general_gemm = None
    clip_grads.multi_tensor_applier = utils.local_multi_tensor_applier
    clip_grads.l2_norm_impl = utils.local_multi_tensor_l2_norm
    clip_grads.multi_tensor_scale_impl = utils.local_multi_tensor_scale
    optimizer.Adam = torch.optim.AdamW
    apply_patches([replace(patch, not_needed_with=()) for patch in patches.ADAM])


def _offload_once(step: int, model: list[Any], optimizer: Any) -> None:
    if step == 1:
        making_room.offload_and_reload(model, optimizer)


def _load_and_make_masters(model: list[Any], optimizer: Any) -> None:
    for chunk in model:
        given_values.load(chunk.module.module)
    optimizer.reload_model_params()


def _describe(model: list[Any], optimizer: Any) -> dict[str, dict[str, Any]]:
    """Return what every expert weight holds, of which class it is, and its whole master."""
    masters = _assemble(model, optimizer)
    return {
        name: {
            "class": type(param).__name__,
            "master": masters[name].view(param.quantized_storage.shape),
            "fields": _fields(param),
            "amax": None if (amax := param.quantized_storage.amax) is None else amax.cpu().clone(),
            "has_moved": param.quantized_storage.has_moved(),
            "initial_is_freed": param.quantized_storage.initial is None,
        }
        for chunk in model
        for name, param in chunk.module.named_parameters()
        if hasattr(param, "quantized_storage")
    }


def _fields(param: Any) -> list[dict[str, torch.Tensor]]:
    """Return what products read of every expert."""
    members = getattr(param, "quantized_tensors", None) or [param]
    names = ("rowwise_data", "columnwise_data", "rowwise_scale_inv", "columnwise_scale_inv")
    names += ("amax_rowwise", "amax_columnwise")
    return [
        {
            f"_{name}": getattr(member, f"_{name}").cpu().clone()
            for name in names
            if getattr(member, f"_{name}", None) is not None
        }
        for member in members
    ]


def _assemble(model: list[Any], optimizer: Any) -> dict[str, torch.Tensor]:
    """Put the master shards of all ranks together that have the same part of the weights."""
    from megatron.core import parallel_state

    names = {p: name for chunk in model for name, p in chunk.module.named_parameters()}
    mine = []
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        groups = zip(part.model_float16_groups, part.shard_fp32_from_float16_groups, strict=True)
        for params, shards in groups:
            for param, shard in zip(params, shards, strict=True):
                start = part._get_model_param_range_map(param)["param"].start
                mine.append((names[param], start, shard.detach().cpu()))
    group = parallel_state.get_data_parallel_group()
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, mine, group=group)
    masters = {name: torch.full((p.numel(),), torch.nan) for p, name in names.items()}
    for name, start, shard in (one for shards in everyone for one in shards):
        masters[name][start : start + shard.numel()] = shard.view(-1)
    return masters


if __name__ == "__main__":
    main(*sys.argv[1:])
