"""One rank of a run whose experts are Transformer Engine's modules, with kernels in torch.

``torchrun --nproc-per-node N -m tests.support.te.native_train FOLDER FORMAT KNOBS [FLAGS]``;
KNOBS are JSON. Beside the plug-in's they may have ``experts``, what of Megatron's configuration
only experts get, functions by their names; ``delays``, whether weight gradients are computed after
the backward pass; ``own_kernels``, whether to keep those of Transformer Engine; ``products``, a
format that bf16 weights are cast to where they are multiplied; ``plugin``, false for Megatron's own
optimizer;
and ``given``: with "before" other values are loaded into the model before it is wrapped, with
"after" when there is an optimizer, which then makes its masters of the weights; and ``offloaded``:
weights leave the device and come back, and masters move, after the first step; and ``recipe``, a
list of a recipe and what is to be put in it, whose flags and knobs take the place of all others.
Writes ``FOLDER/rank<i>.pt``: losses, how many weights with one scale Megatron has cast, and of
every weight what products read of it and its amaxes beside its assembled master, and what of its
experts is exported. On a CPU as on a GPU.
"""

import json
import os
import sys
from copy import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import moe_optim
from moe_optim import MoEOptimConfig
from moe_optim.config.recipes import load_recipe
from moe_optim.errors import ConfigError
from moe_optim.formats import FORMATS, get_format
from moe_optim.rules import FP32_SCALES
from moe_optim.weights.te.fields import is_grouped, is_quantized, read_values
from tests.support.states import given_values, making_room, schedules
from tools.upstream import native_products

RECIPES = {
    "mxfp8": "--fp8-format e4m3 --fp8-recipe mxfp8 --fp8-param-gather",
    "mxfp8_2d": "--fp8-format e4m3 --fp8-recipe mxfp8 --fp8-param-gather",
    "fp8_block": "--fp8-format e4m3 --fp8-recipe blockwise --fp8-param-gather",
    "fp8_block_fp32": "--fp8-format e4m3 --fp8-recipe blockwise --fp8-param-gather",
    "nvfp4": "--fp4-format e2m1 --fp4-recipe nvfp4 --fp4-param-gather",
    "bf16": "",
    "tensorwise": "--fp8-format e4m3 --fp8-recipe tensorwise --fp8-param-gather",
    "bf16 in mxfp8": "--fp8-format e4m3 --fp8-recipe mxfp8",
    "bf16 in nvfp4": "--fp4-format e2m1 --fp4-recipe nvfp4",
}


def main(folder: str, format: str, knobs: str, *flags: str) -> None:
    """Train, and write what this rank saw."""
    on_cpu = not torch.cuda.is_available()
    os.environ[FP32_SCALES] = str(int(format == "fp8_block_fp32"))  # read on import
    if on_cpu:
        native_products.leave_to_torch()
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
    from megatron.core.fusions import fused_bias_geglu
    from megatron.core.models.backends import LocalSpecProvider

    from moe_optim.integration import installation
    from tests.support import training

    if on_cpu:
        native_products.pretend_a_gpu()
    chosen = json.loads(knobs)
    of_experts = chosen.pop("experts", {})
    if "activation_func" in of_experts:
        of_experts["activation_func"] = getattr(fused_bias_geglu, of_experts["activation_func"])
    if chosen.pop("delays", False):
        schedules.turn_on("delay_wgrad_compute")
    products = chosen.pop("products", None)
    when = chosen.pop("given", None)
    is_offloaded = chosen.pop("offloaded", False)
    recipe = chosen.pop("recipe", None)
    has_own_kernels = chosen.pop("own_kernels", False)
    is_ours, is_theirs = chosen.pop("plugin", True), format == "tensorwise"
    config = MoEOptimConfig(**({"format": "auto" if is_theirs else format} | chosen))
    quantized = RECIPES[f"{format} in {products}" if products else format].split()
    if recipe is not None:
        path, *overrides = recipe
        read = load_recipe(path, overrides)
        training.MODEL[:], config, quantized = read.megatron_argv(), read.moe_optim, []
    if is_ours:
        installation.install(config, optimizer="muon" if "muon" in flags else "adam")
    if not has_own_kernels:
        native_products.replace_kernels(*([get_format(format)] if format in FORMATS else []))
    stocks_casts = native_products.replace_master_casts() if is_theirs else []

    def grouped_mlp_modules(_provider: Any, use_grouped_gemm: bool) -> Any:
        build = TESpecProvider().grouped_mlp_modules(use_grouped_gemm)

        def experts(count: int, config: Any, **kwargs: Any) -> Any:
            # set here: Megatron's configuration checks what only a Blackwell has, and dense layers
            # accumulate with apex
            config = copy(config)
            vars(config).update(of_experts)
            if of_experts and hasattr(config, "moe_use_grouped_tensor"):  # megatron-core 0.20
                config.moe_use_grouped_tensor = True
            return build(count, config, **kwargs)

        return experts

    LocalSpecProvider.grouped_mlp_modules = grouped_mlp_modules
    if when == "before":
        given_values.when_built(given_values.load)
    record = training.pretrain(
        [*quantized, *flags],
        config if is_ours else None,
        observe=_observe,
        after_setup=_load_and_make_masters if when == "after" else None,
        after_step=_offload_once if is_offloaded else None,
    )
    torch.save(
        {
            "losses": record.losses,
            "validation_losses": record.validation_losses,
            "norms": record.norms,
            "stocks_casts": stocks_casts,
            **record.extra,
        },
        Path(folder) / f"rank{os.environ['RANK']}.pt",
    )


def _offload_once(step: int, model: list[Any], optimizer: Any) -> None:
    if step == 1:
        making_room.offload_and_reload(model, optimizer)


def _load_and_make_masters(model: list[Any], optimizer: Any) -> None:
    for chunk in model:
        given_values.load(chunk.module.module)
    optimizer.reload_model_params()


def _observe(model: list[Any], optimizer: Any) -> dict[str, Any]:
    return {"weights": _describe(model, optimizer), "exported": _export(model)}


def _export(model: list[Any]) -> dict[str, torch.Tensor] | str:
    """Return what this rank exports of its experts, or why it does not."""
    try:
        given = moe_optim.export_weights(model, layout="sequential", experts="own")
        return {name: one.cpu().clone() for name, one in given if ".local_experts." in name}
    except ConfigError as error:
        return str(error)


def _describe(model: list[Any], optimizer: Any) -> dict[str, dict[str, Any]]:
    """Return what every expert weight holds, of which class it is, and its whole master."""
    masters = _assemble(model, optimizer)
    found = {}
    for chunk in model:
        for name, param in chunk.module.named_parameters():
            if (storage := getattr(param, "quantized_storage", None)) is not None:
                found[name] = {
                    "class": type(param).__name__,
                    "master": masters[name].view(storage.shape),
                    "fields": _fields(param),
                    "amax": None if storage.amax is None else storage.amax.cpu().clone(),
                    "has_moved": storage.has_moved(),
                    "initial_is_freed": storage.initial is None,
                }
            elif ".experts.linear_fc" in name:  # in bf16, or left to Megatron
                values = read_values(param) if is_quantized(param) else param
                values = param.rowwise_data.view(param.shape) if is_grouped(param) else values[None]
                found[name] = {
                    "class": type(param).__name__,
                    "master": masters[name].view(values.shape),
                    "fields": [{"values": one.detach().cpu().clone()} for one in values],
                }
    return found


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
    mine: dict[bool, list[Any]] = {True: [], False: []}  # by whether all ranks share the parameter
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        groups = zip(part.model_float16_groups, part.shard_fp32_from_float16_groups, strict=True)
        for params, shards in groups:
            for param, shard in zip(params, shards, strict=True):
                start = part._get_model_param_range_map(param)["param"].start
                is_shared = getattr(param, "allreduce", True)
                mine[is_shared].append((names[param], start, shard.detach().cpu()))
    everyone: list[Any] = []
    for is_shared, group in (
        (True, parallel_state.get_data_parallel_group()),
        (False, parallel_state.get_expert_data_parallel_group()),
    ):
        gathered: list[Any] = [None] * group.size()
        dist.all_gather_object(gathered, mine[is_shared], group=group)
        everyone += gathered
    masters = {name: torch.full((p.numel(),), torch.nan) for p, name in names.items()}
    for name, start, shard in (one for shards in everyone for one in shards):
        masters[name][start : start + shard.numel()] = shard.view(-1)
    return masters


if __name__ == "__main__":
    main(*sys.argv[1:])
