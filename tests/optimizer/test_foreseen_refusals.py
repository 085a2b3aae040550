"""What would be refused is known from configurations alone, all of it at once."""

import os
from typing import Any

import pytest
import torch

from moe_optim.config import MoEOptimConfig
from tests.optimizer.test_programmatic import REFUSED
from tests.support.ranks import run_ranks

NATIVE = {"fp8": "e4m3", "fp8_recipe": "mxfp8", "fp8_param": True}
TENSORWISE = NATIVE | {"fp8_recipe": "tensorwise"}
AWARE = {"use_precision_aware_optimizer": True}
OFFLOAD = AWARE | {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0, "bf16": True}
PORTABLE = {"transformer_impl": "local", "num_moe_experts": 4, "moe_grouped_gemm": True}
PORTABLE |= {"gated_linear_unit": True, "activation_func": "silu", "add_bias_linear": False}
PORTABLE |= {"bf16": True, "params_dtype": "bfloat16"}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # settings and knobs
    "nothing": ({}, {"format": "bf16"}),
    "native": (NATIVE, {"format": "mxfp8"}),
    "native, square blocks": (NATIVE, {"format": "mxfp8_2d"}),
    "native, another format": (NATIVE, {"format": "nvfp4"}),
    "native, per tensor": (TENSORWISE, {}),
    "native, per tensor, fused": (TENSORWISE | AWARE, {"step": "fused"}),
    "native, per tensor, in a format": (TENSORWISE, {"format": "mxfp8"}),
    "native, per tensor, in bf16": (TENSORWISE, {"format": "bf16"}),
    "native, per tensor, graph": (TENSORWISE | {"optimizer_cuda_graph": True}, {}),
    "native, per tensor, shared memory": (
        TENSORWISE | {"reuse_grad_buf_for_mxfp8_param_ag": True},
        {},
    ),
    "native, per tensor, recorded": (TENSORWISE, {"record_amax": True}),
    "native, per tensor, on the host": (TENSORWISE, {"offload_states": 0.5}),
    "native, older scales": (NATIVE | {"fp8_recipe": "delayed"}, {}),
    "native, nvfp4": ({"fp4": "e2m1", "fp4_param": True}, {"format": "nvfp4"}),
    "registered memory": ({"nccl_ub": True}, {"format": "bf16"}),
    "recipe, bf16 weights": (NATIVE | {"fp8_param": False}, {"format": "bf16"}),
    "no weights": ({}, {"format": "mxfp8"}),
    "no products": ({}, {"format": "bf16", "compute": "nvfp4"}),
    "no products, in bf16": ({}, {"format": "bf16", "compute": "bf16"}),
    "portable": (PORTABLE, {"format": "nvfp4"}),
    "portable products": (PORTABLE, {"format": "bf16", "compute": "nvfp4"}),
    "portable products on grids": (PORTABLE, {"format": "bf16", "compute": "int8_per_expert"}),
    "portable, cut experts on grids": (
        PORTABLE | {"expert_tensor_parallel_size": 2},
        {"format": "bf16", "compute": "e4m3_per_expert"},
    ),
    "portable, cut blocks": (
        PORTABLE | {"moe_mlp_glu_interleave_size": 32, "expert_tensor_parallel_size": 2},
        {"format": "nvfp4"},
    ),
    "graph": (NATIVE | {"optimizer_cuda_graph": True}, {"format": "mxfp8"}),
    "graph, stock's step": (
        NATIVE | {"optimizer_cuda_graph": True},
        {"format": "mxfp8", "layout": "stock"},
    ),
    "graph, no kernels": (
        NATIVE | {"optimizer_cuda_graph": True},
        {"format": "mxfp8", "backend": "reference"},
    ),
    "states on the host": (NATIVE, {"format": "mxfp8", "offload_states": 1}),
    "states on the host, stock's step": (
        NATIVE,
        {"format": "mxfp8", "offload_states": 0.5, "layout": "stock"},
    ),
    "states on the host, loss scale": (
        NATIVE | {"loss_scale": 8.0},
        {"format": "mxfp8", "offload_states": 0.5},
    ),
    "states on the host by a flag": (OFFLOAD, {"format": "bf16"}),
    "states on the host by both": (NATIVE | OFFLOAD, {"format": "mxfp8", "offload_states": 0.5}),
    "states on the host by a flag, stock's step": (OFFLOAD, {"format": "bf16", "step": "stock"}),
    "states on the host by a flag, stock's layout": (
        OFFLOAD,
        {"format": "bf16", "layout": "stock"},
    ),
    "states on the host by a flag, fp32 weights": (OFFLOAD | {"bf16": False}, {"format": "bf16"}),
    "states on the host by a flag, less than none": (
        OFFLOAD | {"optimizer_offload_fraction": -0.5},
        {"format": "bf16"},
    ),
    "states on the host by a flag, narrow masters": (
        OFFLOAD | {"main_params_dtype": torch.float16},
        {"format": "bf16"},
    ),
    "fused, loss scale": (NATIVE | {"loss_scale": 8.0}, {"format": "mxfp8", "step": "fused"}),
    "stock, loss scale": (NATIVE | {"loss_scale": 8.0}, {"format": "mxfp8"}),
    "fused, precision-aware": (AWARE, {"format": "bf16", "step": "fused"}),
    "fused, Adam's masters": (
        AWARE | {"main_params_dtype": torch.float16},
        {"format": "bf16", "step": "fused"},
    ),
    "two at once": (NATIVE | {"use_megatron_fsdp": True, "optimizer": "sgd"}, {"format": "mxfp8"}),
} | {
    flag: (NATIVE | AWARE | {name: value}, {"format": "mxfp8"})
    for flag, (name, value) in REFUSED.items()
}


RECIPES: dict[str, dict[str, Any]] = {
    "--fp8-recipe blockwise": NATIVE | {"fp8_recipe": "blockwise"},
    "--fp8-recipe mxfp8": NATIVE,
    "--fp4-recipe nvfp4": {"fp4": "e2m1", "fp4_recipe": "nvfp4", "fp4_param": True},
}
VARIABLES = {  # of Transformer Engine: what makes other bytes of weights, with which recipe
    "fp32 scales": ("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1", "--fp8-recipe blockwise"),
    "power-of-two scales": ("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "0", None),
    "blocks of rows": ("NVTE_NVFP4_DISABLE_2D_QUANTIZATION", "1", "--fp4-recipe nvfp4"),
    "four-over-six": ("NVTE_NVFP4_4OVER6", "weights", "--fp4-recipe nvfp4"),
    "four-over-six of all": ("NVTE_NVFP4_4OVER6", "all", "--fp4-recipe nvfp4"),
    "four-over-six of activations": ("NVTE_NVFP4_4OVER6", "activations", None),
}


def _foresee() -> dict[str, list[str]]:
    import torch
    import torch.nn.functional as functional
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    from moe_optim.optimizer.requirements import foresee_refusals

    def foresee(settings: dict[str, Any], knobs: dict[str, Any]) -> list[str]:
        optimizer = OptimizerConfig(use_distributed_optimizer=True)
        ddp = DistributedDataParallelConfig()
        model = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=1)
        model.ffn_hidden_size = model.moe_ffn_hidden_size = 64
        values = {"silu": functional.silu, "bfloat16": torch.bfloat16}
        for name, value in settings.items():
            found = [config for config in (optimizer, ddp, model) if hasattr(config, name)]
            assert found
            for config in found:
                plain = isinstance(value, str) and name in ("activation_func", "params_dtype")
                setattr(config, name, values[value] if plain else value)
        return foresee_refusals(optimizer, ddp, [model, model], MoEOptimConfig(**knobs))

    found = {name: foresee(*case) for name, case in CASES.items()}
    for variable, value, _ in VARIABLES.values():
        os.environ[variable] = value
        for name, settings in RECIPES.items():
            found[f"{variable}={value}, {name}"] = foresee(settings, {})
        del os.environ[variable]
    return found


@pytest.fixture(scope="module")
def foreseen() -> dict[str, list[str]]:
    return run_ranks(1, _foresee)[0]


@pytest.mark.parametrize("flag", REFUSED)
def test_what_the_built_model_is_refused_for_is_foreseen(foreseen, flag):
    (setting,) = foreseen[flag]
    assert flag in setting


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("variable", "value", "changed"), VARIABLES.values(), ids=VARIABLES)
def test_variables_that_make_other_bytes_are_foreseen_with_their_recipe(
    foreseen, variable, value, changed, recipe
):
    """Transformer Engine reads them when it is imported; what it then makes is refused."""
    want = [f"{variable}={value} with {recipe} (unset it)"] if recipe == changed else []
    assert foreseen[f"{variable}={value}, {recipe}"] == want


def test_all_is_named_and_nothing_raised(foreseen):
    assert foreseen["two at once"] == ["--use-megatron-fsdp", "--optimizer sgd (give adam)"]


@pytest.mark.parametrize(
    "case",
    [
        "nothing",
        "native",
        "native, square blocks",
        "native, nvfp4",
        "native, per tensor",
        "native, per tensor, fused",
        "recipe, bf16 weights",
        "no products, in bf16",
        "registered memory",
        "graph",
        "states on the host",
        "states on the host by a flag",
        "states on the host by both",
        "states on the host by a flag, less than none",
        "stock, loss scale",
        "fused, precision-aware",
        "portable",
        "portable products",
        "portable products on grids",
    ],
)
def test_what_trains_is_not_refused(foreseen, case):
    assert foreseen[case] == []


@pytest.mark.parametrize(
    ("case", "refused"),
    [
        ("native, another format", "moe_optim.format nvfp4 with --fp8-recipe mxfp8 (give mxfp8 or"),
        ("native, older scales", "--fp8-recipe delayed with weights kept in it (drop the native"),
        (
            "native, per tensor, in a format",
            "moe_optim.format mxfp8 with --fp8-recipe tensorwise (give auto)",
        ),
        (
            "native, per tensor, in bf16",
            "moe_optim.format bf16 with --fp8-recipe tensorwise (give auto)",
        ),
        ("native, per tensor, graph", "--optimizer-cuda-graph with weights with one scale"),
        (
            "native, per tensor, shared memory",
            "--reuse-grad-buf-for-mxfp8-param-ag with weights with one scale",
        ),
        ("native, per tensor, recorded", "moe_optim.record_amax with weights with one sc"),
        (
            "native, per tensor, on the host",
            "moe_optim.offload_states, or --optimizer-cpu-offload, with weights with one",
        ),
        ("no weights", "moe_optim.format mxfp8 without weights to keep in it"),
        ("graph, stock's step", "--optimizer-cuda-graph without a fused step"),
        ("graph, no kernels", "--optimizer-cuda-graph without a fused step"),
        (
            "states on the host, stock's step",
            "moe_optim.offload_states 0.5 without a fused step (s",
        ),
        (
            "states on the host, loss scale",
            "moe_optim.offload_states 0.5 without a fused step (remove a loss scale, "
            "of --fp16 or --loss-scale)",
        ),
        (
            "states on the host by a flag, stock's step",
            "--optimizer-cpu-offload with moe_optim.step stock (set step: fused)",
        ),
        (
            "states on the host by a flag, stock's layout",
            "--optimizer-cpu-offload without a fused step (set step: fused)",
        ),
        (
            "states on the host by a flag, narrow masters",
            "--optimizer-cpu-offload without a fused step (remove masters that Adam holds",
        ),
        ("states on the host by a flag, fp32 weights", "--optimizer-cpu-offload without --bf16"),
        (
            "fused, loss scale",
            "moe_optim.step fused with a loss scale, of --fp16 or --loss-scale (set step: auto)",
        ),
        ("fused, Adam's masters", "moe_optim.step fused with masters that Adam holds"),
        ("no products", "moe_optim.compute nvfp4 without portable experts"),
        (
            "portable, cut experts on grids",
            "moe_optim.compute e4m3_per_expert with --expert-tensor-parallel-size above 1",
        ),
        (
            "portable, cut blocks",
            "--moe-mlp-glu-interleave-size with --expert-tensor-parallel-size",
        ),
    ],
)
def test_what_knobs_need_is_named_with_what_to_change(foreseen, case, refused):
    (setting,) = foreseen[case]
    assert setting.startswith(refused)
