"""The table of what goes with what: every rule is told by a case, and what trains breaks none."""

import os
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any, get_args
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as functional

from moe_optim import rules
from moe_optim.config import MoEOptimConfig
from moe_optim.errors import ConfigError
from moe_optim.rules import (
    FP32_SCALES,
    RULES,
    Setup,
    check_setup,
    refusals,
    remarks,
    why_stock_step,
)
from tests.support.ranks import run_ranks

NATIVE = {"fp8": "e4m3", "fp8_recipe": "mxfp8", "fp8_param": True}
TENSORWISE = NATIVE | {"fp8_recipe": "tensorwise"}
AWARE = {"use_precision_aware_optimizer": True}
OFFLOAD = AWARE | {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0, "bf16": True}
PORTABLE = {"transformer_impl": "local", "num_moe_experts": 4, "moe_grouped_gemm": True}
PORTABLE |= {"gated_linear_unit": True, "activation_func": functional.silu}
PORTABLE |= {"add_bias_linear": False, "bf16": True, "params_dtype": torch.bfloat16}
TE = {"transformer_impl": "transformer_engine", "num_moe_experts": 4, "moe_grouped_gemm": True}
TE |= {"bf16": True, "params_dtype": torch.bfloat16}
BF16, MXFP8 = {"format": "bf16"}, {"format": "mxfp8"}
COPIED = BF16 | {"compute": "mxfp4"}
CUT = {"expert_tensor_parallel_size": 2}
FP16_MASTERS = {"main_params_dtype": torch.float16}
MUON = {"optimizer": "muon"}
Settings = dict[str, Any]

TRAINS: dict[str, tuple[Settings, Settings]] = {  # Megatron's settings, the plug-in's
    "nothing": ({}, BF16),
    "native": (NATIVE, MXFP8),
    "native, nvfp4": ({"fp4": "e2m1", "fp4_param": True}, {"format": "nvfp4"}),
    "tensorwise": (TENSORWISE, {}),
    "tensorwise, fused": (TENSORWISE | AWARE, {"step": "fused"}),
    "a recipe, bf16 weights": (NATIVE | {"fp8_param": False}, BF16),
    "portable": (PORTABLE, {"format": "nvfp4"}),
    "portable, compute": (PORTABLE, BF16 | {"compute": "nvfp4"}),
    "Transformer Engine, compute": (TE, COPIED),
    "Transformer Engine, compute and FP8 GEMMs": (TE | NATIVE | {"fp8_param": False}, COPIED),
    "Transformer Engine, compute and graphs of other parts": (
        TE | {"cuda_graph_impl": "local", "cuda_graph_modules": [SimpleNamespace(name="attn")]},
        COPIED),
    **{
        f"Transformer Engine, compute: {compute}": (TE | CUT, BF16 | {"compute": compute})
        for compute in ("mxfp8_2d", "nvfp4", "fp8_block", "int8_per_expert", "e4m3_per_expert")
    },
    "portable, probs on input": (
        PORTABLE | {"moe_apply_probs_on_input": True, "moe_router_topk": 1}, {"format": "nvfp4"}),
    "portable, other parts graphed and recomputed": (
        PORTABLE
        | {"cuda_graph_impl": "local", "cuda_graph_modules": [SimpleNamespace(name="attn")]}
        | {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
        {"format": "nvfp4"},
    ),
    "graph": (NATIVE | {"optimizer_cuda_graph": True}, MXFP8),
    "offload": (NATIVE, MXFP8 | {"offload_states": 1}),
    "offload by a flag": (OFFLOAD, BF16),
    "offload by both": (NATIVE | OFFLOAD, MXFP8 | {"offload_states": 0.5}),
    "stock, loss scale": (NATIVE | {"loss_scale": 8.0}, MXFP8),
    "fused, precision-aware": (AWARE, BF16 | {"step": "fused"}),
    "Muon": (MUON, BF16),
    "Muon, stock": (MUON, BF16 | {"step": "stock"}),
    "Muon, stock, by another kernel": (MUON | {"muon_use_syrk": True}, BF16 | {"step": "stock"}),
    "Muon, every value of its own": (
        MUON
        | {"muon_coefficient_type": "deepseekv4", "muon_scale_mode": "unit_rms_norm"}
        | {"muon_fp32_matmul_prec": "highest", "muon_tp_mode": "distributed"}
        | {"muon_num_ns_steps": 1},
        BF16,
    ),
    "Muon, gate and up apart": (MUON, BF16 | {"muon_gate_up": "apart"}),
    "Muon, the Gram form": (
        MUON | {"muon_tp_mode": "duplicated"},
        BF16 | {"muon_iteration": "gram", "muon_workspace_mib": 64}),
    "Muon, fp16 over ranks": (
        MUON | {"muon_tp_mode": "distributed"}, BF16 | {"muon_iteration": "fp16"}),
    "Muon, gate and up apart in plain torch": (
        MUON, BF16 | {"muon_gate_up": "apart", "backend": "reference", "step": "fused"}),
}  # fmt: skip

REFUSED: dict[str, tuple[Settings, Settings]] = {  # beginning of what is told -> as above
    "--use-megatron-fsdp:": (NATIVE | {"use_megatron_fsdp": True}, MXFP8),
    "--optimizer adam without --use-distributed-optimizer:": (
        {"use_distributed_optimizer": False}, BF16),
    "--optimizer sgd:": ({"optimizer": "sgd"}, BF16),
    "--optimizer muon without --use-distributed-optimizer: masters": (
        MUON | {"use_distributed_optimizer": False}, BF16),
    "--optimizer adaptive_muon: no step here": ({"optimizer": "adaptive_muon"}, BF16),
    "--optimizer soap: no step here": ({"optimizer": "soap"}, BF16),
    "--optimizer lion: no step here": ({"optimizer": "lion"}, BF16),
    "--optimizer dist_muon: only Adam and Muon": ({"optimizer": "dist_muon"}, BF16),
    "use_layer_wise_distributed_optimizer:": (
        MUON | {"use_layer_wise_distributed_optimizer": True}, BF16),
    "--muon-scalar-optimizer lion:": (MUON | {"muon_scalar_optimizer": "lion"}, BF16),
    "--muon-coefficient-type custom: expected simple, quintic,": (
        MUON | {"muon_coefficient_type": "custom"}, BF16),
    "--muon-fp32-matmul-prec low: expected medium, high or highest": (
        MUON | {"muon_fp32_matmul_prec": "low"}, BF16),
    "--muon-scale-mode none:": (MUON | {"muon_scale_mode": "none"}, BF16),
    "--muon-tp-mode gathered:": (MUON | {"muon_tp_mode": "gathered"}, BF16),
    "--muon-num-ns-steps below 1:": (MUON | {"muon_num_ns_steps": 0}, BF16),
    "--muon-use-syrk with a fused step:": (MUON | {"muon_use_syrk": True}, BF16),
    "--use-precision-aware-optimizer with Muon:": (MUON | AWARE, BF16 | {"step": "fused"}),
    "offload_states: 0.5 with Muon:": (MUON, BF16 | {"offload_states": 0.5}),
    "--optimizer-cpu-offload with Muon:": (
        MUON | {"optimizer_cpu_offload": True, "bf16": True}, BF16),
    "--optimizer-cuda-graph with --muon-tp-mode duplicated": (
        MUON
        | {"optimizer_cuda_graph": True, "muon_tp_mode": "duplicated"}
        | {"tensor_model_parallel_size": 2},
        BF16,
    ),
    "--moe-single-grouped-bias with Muon:": (MUON | {"moe_single_grouped_bias": True}, BF16),
    "--fp16 with Muon:": (MUON | {"fp16": True}, BF16),
    "--num-distributed-optimizer-instances above 1 with Muon:": (
        MUON | {"num_distributed_optimizer_instances": 2}, BF16),
    "--tensor-parallel-num-weight-shards with Muon:": (MUON | {"gtp_weight_remat_size": 2}, BF16),
    "--expert-tensor-parallel-num-weight-shards with Muon:": (
        MUON | {"expert_gtp_weight_remat_size": 2}, BF16),
    "muon_iteration: fp16 with --muon-fp32-matmul-prec highest:": (
        MUON | {"muon_fp32_matmul_prec": "highest"}, BF16 | {"muon_iteration": "fp16"}),
    "muon_iteration: gram with --muon-tp-mode distributed:": (
        MUON | {"muon_tp_mode": "distributed"}, BF16 | {"muon_iteration": "gram"}),
    "muon_gate_up: apart and muon_iteration: fp16 with step: stock:": (
        MUON, BF16 | {"muon_gate_up": "apart", "muon_iteration": "fp16", "step": "stock"}),
    "muon_gate_up: apart with backend: reference:": (
        MUON, BF16 | {"muon_gate_up": "apart", "backend": "reference"}),
    "--chunked-optimizer-state-offload:": ({"chunked_optimizer_state_offload": True}, BF16),
    "--qk-clip:": ({"qk_clip": True}, BF16),
    "--use-nccl-ub with quantized weights:": (NATIVE | {"nccl_ub": True}, MXFP8),
    "--disable-grad-buffers-cpu-backup with quantized weights:": (
        NATIVE | {"disable_grad_buffers_cpu_backup": True}, MXFP8),
    "--fp16:": (NATIVE | {"fp16": True}, MXFP8),
    "--main-params-dtype fp16:": (NATIVE | AWARE | FP16_MASTERS, MXFP8),
    "--tensor-parallel-num-weight-shards above": (NATIVE | {"gtp_weight_remat_size": 2}, MXFP8),
    "--expert-tensor-parallel-num-weight-shards above": (
        NATIVE | {"expert_gtp_weight_remat_size": 2}, MXFP8),
    "format: nvfp4 with weights that take mxfp8 or mxfp8_2d:": (NATIVE, {"format": "nvfp4"}),
    "format: mxfp8 with weights that take auto:": (TENSORWISE, MXFP8),
    "format: bf16 with weights that take auto:": (TENSORWISE, BF16),
    "--fp8-recipe delayed with weights kept in it:": (NATIVE | {"fp8_recipe": "delayed"}, MXFP8),
    "format: mxfp8 without weights to store in it:": ({}, MXFP8),
    "compute: nvfp4 without portable experts:": ({}, BF16 | {"compute": "nvfp4"}),
    "compute: mxfp8 with experts of Transformer Engine: GEMMs of both directions": (
        TE, BF16 | {"compute": "mxfp8"}),
    "compute with --transformer-impl inference_optimized:": (
        TE | {"transformer_impl": "inference_optimized"}, COPIED),
    "compute with --moe-single-grouped-weight:": (TE | {"moe_single_grouped_weight": True}, COPIED),
    "compute with --use-transformer-engine-op-fuser:": (
        TE | {"use_transformer_engine_op_fuser": True}, COPIED),
    "compute with --cuda-graph-impl over experts:": (TE | {"cuda_graph_impl": "local"}, COPIED),
    "compute with --params-dtype other than bf16:": (TE | {"params_dtype": torch.float32}, COPIED),
    "compute with --expert-tensor-parallel-num-weight-shards above": (
        TE | {"expert_gtp_weight_remat_size": 2}, COPIED),
    "--optimizer-cuda-graph with tensorwise weights:": (
        TENSORWISE | {"optimizer_cuda_graph": True}, {}),
    "--reuse-grad-buf-for-mxfp8-param-ag with tensorwise weights:": (
        TENSORWISE | {"reuse_grad_buf_for_mxfp8_param_ag": True}, {}),
    "record_amax with tensorwise weights:": (TENSORWISE, {"record_amax": True}),
    "offload_states, or --optimizer-cpu-offload, with tensorwise": (
        TENSORWISE, {"offload_states": 0.5}),
    "--optimizer-cuda-graph with layout: stock:": (
        NATIVE | {"optimizer_cuda_graph": True}, MXFP8 | {"layout": "stock"}),
    "--optimizer-cuda-graph with backend: reference:": (
        NATIVE | {"optimizer_cuda_graph": True}, MXFP8 | {"backend": "reference"}),
    "offload_states: 0.5 with layout: stock:": (
        NATIVE, MXFP8 | {"offload_states": 0.5, "layout": "stock"}),
    "offload_states: 0.5 with a loss scale": (
        NATIVE | {"loss_scale": 8.0}, MXFP8 | {"offload_states": 0.5}),
    "--optimizer-cpu-offload with step: stock:": (OFFLOAD, BF16 | {"step": "stock"}),
    "--optimizer-cpu-offload with layout: stock:": (OFFLOAD, BF16 | {"layout": "stock"}),
    "--optimizer-cpu-offload with masters that Adam holds": (OFFLOAD | FP16_MASTERS, BF16),
    "--optimizer-cpu-offload without --bf16:": (OFFLOAD | {"bf16": False}, BF16),
    "step: fused with a loss scale": (NATIVE | {"loss_scale": 8.0}, MXFP8 | {"step": "fused"}),
    "step: fused with masters that Adam holds": (AWARE | FP16_MASTERS, BF16 | {"step": "fused"}),
    "step: fused with moments in torch.float16 and torch.float16": (
        AWARE | {"exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.float16},
        BF16 | {"step": "fused"}),
    "linear_fc1 [128, 32] in int4_g128, whose blocks have 128 elements: expected whole": (
        PORTABLE, {"format": "int4_g128"}),
    "linear_fc2 [32, 16] in mxfp8, whose blocks have 32 elements: expected whole": (
        PORTABLE | {"expert_tensor_parallel_size": 4}, BF16 | {"compute": "mxfp8"}),
    "--moe-apply-probs-on-input with --moe-router-topk above 1:": (
        PORTABLE | {"moe_apply_probs_on_input": True, "moe_router_topk": 2}, BF16),
}  # fmt: skip

UNSUPPORTED: dict[str, list[Settings]] = {  # by portable experts -> settings, each of which is told
    "biases with fused SwiGLU": [{"add_bias_linear": True, "bias_activation_fusion": True}],
    "an activation other than --swiglu or --quick-geglu": [
        {"activation_func": functional.gelu},
        {"gated_linear_unit": False},
    ],
    "--activation-func-clamp-value with fused SwiGLU": [
        {"activation_func_clamp_value": 0.0, "bias_activation_fusion": True}
    ],
    "--moe-mlp-glu-interleave-size that does not divide --moe-ffn-hidden-size": [
        {"moe_mlp_glu_interleave_size": 48}
    ],
    "--use-te-activation-func": [{"use_te_activation_func": True}],
    "--moe-latent-size": [{"moe_latent_size": 32}],
    "--expert-tensor-parallel-size that does not divide --moe-ffn-hidden-size": [
        {"expert_tensor_parallel_size": 3}
    ],
    "--moe-mlp-glu-interleave-size with --expert-tensor-parallel-size above 1": [
        CUT | {"moe_mlp_glu_interleave_size": 32}
    ],
    "--use-cpu-initialization": [{"use_cpu_initialization": True}],
    "--params-dtype other than bf16": [
        {"params_dtype": torch.float32},
        {"params_dtype": torch.float16},
    ],
    "--fp8-format or --fp4-format": [{"fp8": "e4m3"}, {"fp4": "e2m1"}],
    "--cuda-graph-impl over experts": [
        {"cuda_graph_impl": "local", "cuda_graph_modules": []},
        {"cuda_graph_impl": "local", "cuda_graph_modules": [SimpleNamespace(name="moe")]},
    ],
    "--recompute-modules moe_act": [
        {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}
    ],
    "--offload-modules expert_fc1 or moe_act": [
        {"fine_grained_activation_offloading": True, "offload_modules": modules}
        for modules in (["core_attn", "expert_fc1"], ["moe_act"])
    ],
    "--moe-paged-stash": [{"moe_paged_stash": True}],
    "--use-transformer-engine-op-fuser": [{"use_transformer_engine_op_fuser": True}],
    "--expert-tensor-parallel-num-weight-shards with portable experts": [
        {"expert_gtp_weight_remat_size": 2}
    ],
}  # fmt: skip

RECIPES: dict[str, Settings] = {
    "--fp8-recipe blockwise": NATIVE | {"fp8_recipe": "blockwise"},
    "--fp8-recipe mxfp8": NATIVE,
    "--fp4-recipe nvfp4": {"fp4": "e2m1", "fp4_recipe": "nvfp4", "fp4_param": True},
}
SCALES = {"1": "fp8_block_fp32", "0": "fp8_block"}  # by value of FP32_SCALES
VARIABLES = {  # of Transformer Engine: what changes bytes of weights, with which recipe
    "fp32 scales": (FP32_SCALES, "1", None),
    "power-of-two scales": (FP32_SCALES, "0", None),
    "blocks of rows": ("NVTE_NVFP4_DISABLE_2D_QUANTIZATION", "1", "--fp4-recipe nvfp4"),
    "four-over-six": ("NVTE_NVFP4_4OVER6", "weights", "--fp4-recipe nvfp4"),
    "four-over-six of all": ("NVTE_NVFP4_4OVER6", "all", "--fp4-recipe nvfp4"),
    "four-over-six of activations": ("NVTE_NVFP4_4OVER6", "activations", None),
}


BRANCHES = {
    "gtp_weight_remat_size", "expert_gtp_weight_remat_size",
    "chunked_optimizer_state_offload", "disable_grad_buffers_cpu_backup",
}  # fmt: skip
"""Fields that either Megatron's dev branch or all else lack."""


def setup_of(settings: Settings, config: Settings) -> Setup:
    """Return what Megatron's own configurations tell with some fields changed."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    flags = OptimizerConfig(use_distributed_optimizer=True)
    flags.muon_use_syrk = False  # of 0.20
    ddp = DistributedDataParallelConfig()
    model = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=1)
    model.ffn_hidden_size = model.moe_ffn_hidden_size = 64
    model.bias_activation_fusion = False
    for name, value in settings.items():
        having = [one for one in (flags, ddp, model) if hasattr(one, name)]
        assert having or name in BRANCHES, name
        for one in having or (flags, ddp, model):
            setattr(one, name, value)
            if name in BRANCHES:  # declared there
                one.__class__ = type(type(one).__name__, (type(one),), {name: value})
    return Setup.of_flags(MoEOptimConfig(**config), flags, ddp, [model, model])


def _tell() -> dict[str, list[str]]:
    told = {name: refusals(setup_of(*case)) for name, case in (TRAINS | REFUSED).items()}
    for variable, value, _ in VARIABLES.values():
        os.environ[variable] = value
        for name, settings in RECIPES.items():
            told[f"{variable}={value}, {name}"] = refusals(setup_of(settings, {}))
        del os.environ[variable]
    for value, format in product(SCALES, ("auto", *SCALES.values())):
        with patch.dict(os.environ, {FP32_SCALES: value}):
            setup = setup_of(RECIPES["--fp8-recipe blockwise"], {"format": format})
            told[f"{FP32_SCALES}={value}, {format}"] = refusals(setup)
    for name, changes in UNSUPPORTED.items():
        lines = [refusals(setup_of(PORTABLE | change, BF16)) for change in changes]
        told[name] = [line.partition(". ")[0] for (line,) in lines]
    two = setup_of(NATIVE | {"use_megatron_fsdp": True, "optimizer": "sgd"}, MXFP8)
    with pytest.raises(ConfigError) as error:
        check_setup(two, "moe_optim")
    told["two"] = str(error.value).splitlines()
    built = setup_of(NATIVE | {"optimizer_cuda_graph": True}, MXFP8)
    agreed = "masters on a device without kernels"
    told["built on a CPU"] = refusals(replace(built, stock_reason=agreed))
    told["remarks"] = remarks(setup_of(OFFLOAD, BF16), "note")
    told |= _tell_without_emerging_optimizers()
    return told


def _tell_without_emerging_optimizers() -> dict[str, list[str]]:
    """Return what Muon is told if the package that Megatron's own step calls is missing."""
    find, rules.find_package = rules.find_package, lambda name: None
    try:
        return {
            case: refusals(setup_of(MUON, BF16 | config))
            for case, config in {
                "Megatron's own Muon": {"step": "stock"},
                "Megatron's layout": {"layout": "stock"},
                "Muon's fused step": {},
            }.items()
        }
    finally:
        rules.find_package = find


@pytest.fixture(scope="module")
def told() -> dict[str, list[str]]:
    return run_ranks(1, _tell)[0]


@pytest.mark.parametrize("case", TRAINS)
def test_what_trains_is_not_refused(told, case):
    assert told[case] == []


@pytest.mark.parametrize("beginning", REFUSED)
def test_what_is_refused_is_told_by_what_the_user_has_set(told, beginning):
    """Before anything is built, and nothing else is told."""
    (line,) = told[beginning]
    assert line.startswith(beginning) and line.endswith(".")


def test_megatrons_own_muon_needs_emerging_optimizers(told):
    """A fused step does not, and what is installed is not refused ("Muon, stock" trains)."""
    for case, found in (
        ("Megatron's own Muon", "step: stock"),
        ("Megatron's layout", "layout: stock"),
    ):
        (line,) = told[case]
        assert line.startswith(f"--optimizer muon with {found}: Megatron's own step calls emerging")
        assert line.endswith("Set step: fused; or run pip install 'moe_optim[muon]'.")
    assert told["Muon's fused step"] == []


def test_what_ranks_have_agreed_on_is_remedied_by_name(told):
    """The optimizer knows what makes its step Megatron's, and flags alone do not."""
    (line,) = told["built on a CPU"]
    assert line.startswith("--optimizer-cuda-graph with masters on a device without kernels: ")
    assert line.endswith(". Set step: fused, which runs in plain torch there; or drop the flag.")


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_portable_experts_do_not_have_is_refused(told, name):
    """In bf16, too; also where the experts of a model are built without a dry run."""
    assert told[name] == [f"{name}: portable experts do not have it"] * len(UNSUPPORTED[name])


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("variable", "value", "changed"), VARIABLES.values(), ids=VARIABLES)
def test_variables_that_change_bytes_are_refused_with_their_recipe(
    told, variable, value, changed, recipe
):
    lines = told[f"{variable}={value}, {recipe}"]
    assert [line.partition(": ")[0] for line in lines] == (
        [f"{variable}={value} with {recipe}"] if recipe == changed else []
    )


@pytest.mark.parametrize("value", SCALES)
def test_a_variable_of_transformer_engine_decides_on_the_scales_of_fp8_blocks(told, value):
    """``auto`` and the name of what it decides train; the other name is refused by the variable."""
    taken, other = SCALES[value], next(name for name in SCALES.values() if name != SCALES[value])
    assert told[f"{FP32_SCALES}={value}, auto"] == told[f"{FP32_SCALES}={value}, {taken}"] == []
    (line,) = told[f"{FP32_SCALES}={value}, {other}"]
    said = f"({'with' if value == '1' else 'without'} {FP32_SCALES}=1): --fp8-recipe"
    assert line.startswith(f"format: {other} with weights that take {taken} {said}")
    assert "Set --moe-optim-set format=auto" in line


def test_an_error_names_all_that_is_wrong(told):
    first, *lines = told["two"]
    assert first == "moe_optim: expected settings that go together, got:"
    assert [line.partition(": ")[0] for line in lines] == [
        "  --use-megatron-fsdp",
        "  --optimizer sgd",
    ]


def test_every_rule_that_flags_break_has_a_case(told):
    lines = [line for of_case in told.values() for line in of_case]
    untold = [
        rule.name
        for rule in RULES
        if rule.effect == "refuse" and rule.known == "flags"
        if rule.scope not in ("any configuration", "moe-optim train")
        if rule.name not in UNSUPPORTED
        if not any(f": {rule.reason}. " in line for line in lines)
    ]
    assert untold == []


def test_flags_that_change_nothing_are_remarked_on(told):
    (line,) = told["remarks"]
    assert line.startswith("--optimizer-cpu-offload: it sets offload_states")


STEPS: dict[str, tuple[Settings, str | None]] = {  # configuration -> what makes steps Megatron's
    "defaults": ({}, None),
    "asked for": ({"step": "fused"}, None),
    "asked for, in stock's layout": ({"step": "fused", "layout": "stock"}, None),
    "asked for, in plain torch": ({"step": "fused", "backend": "reference"}, None),
    "stock's": ({"step": "stock"}, "step: stock"),
    "stock's layout": ({"layout": "stock"}, "layout: stock"),
    "plain torch": ({"backend": "reference"}, "backend: reference"),
}


@pytest.mark.parametrize(("config", "reason"), STEPS.values(), ids=STEPS)
def test_steps_are_fused_unless_a_setting_asks_for_megatrons_bits_or_for_no_kernels(config, reason):
    assert why_stock_step(Setup(config=MoEOptimConfig(**config))) == reason


BUILT = SimpleNamespace(
    optimizer="adam",
    fp16=False,
    loss_scale=None,
    exp_avg_dtype=torch.float32,
    exp_avg_sq_dtype=torch.float32,
    optimizer_cpu_offload=False,
)


def test_an_optimizer_that_was_built_can_make_steps_megatrons():
    auto = MoEOptimConfig()
    setup = Setup(config=auto, optimizer=BUILT, masters_of_adam=False)
    assert why_stock_step(setup) is None
    without = replace(setup, has_kernels=False)
    assert why_stock_step(without) == "masters on a device without kernels"
    for config in (MoEOptimConfig(step="fused"), MoEOptimConfig(offload_states=0.5)):
        assert why_stock_step(replace(without, config=config)) is None
    assert why_stock_step(replace(setup, adam="AdamW")).startswith("AdamW, an Adam other than")


def test_a_fused_step_of_muon_needs_no_kernels():
    """What else makes a step Megatron's does so with Muon, too."""
    muon = SimpleNamespace(**vars(BUILT) | MUON)
    setup = Setup(config=MoEOptimConfig(), optimizer=muon, masters_of_adam=False, has_kernels=False)
    assert why_stock_step(setup) is None
    for setting, value in (("step", "stock"), ("layout", "stock"), ("backend", "reference")):
        config = MoEOptimConfig(**{setting: value})
        assert why_stock_step(replace(setup, config=config)) == f"{setting}: {value}"


def _warn() -> list[list[str]]:
    settings = {"muon_iteration": "gram", "muon_workspace_mib": 64}
    cans = MUON | {"muon_coefficient_type": "cans"}
    in_fp32 = cans | {"muon_fp32_matmul_prec": "high"}
    cases = (({}, settings), (cans, {}), (MUON, settings), (in_fp32, {}), ({}, {}))
    return [remarks(setup_of(flags, BF16 | config), "warn") for flags, config in cases]


def test_settings_of_muon_are_warned_of_where_they_have_no_effect_or_a_bad_one():
    (unused,), (diverging,), *others = run_ranks(1, _warn)[0]
    assert unused.startswith(
        "muon_iteration: gram and muon_workspace_mib: 64 without Muon: without e"
    )
    assert diverging.startswith("--muon-coefficient-type cans with --muon-fp32-matmul-prec medium")
    assert others == [[], [], []]


@pytest.mark.parametrize("optimizer", ["muon", "adam"])
def test_megatrons_layout_flag_is_remarked_on_with_muon(optimizer):
    """A YAML file may lack the field."""
    args = SimpleNamespace(optimizer=optimizer, use_layer_wise_param_layout=False)
    lines = remarks(Setup(config=MoEOptimConfig(), args=args), "note")
    assert [line.partition(": ")[0] for line in lines] == (
        ["--no-use-layer-wise-param-layout"] if optimizer == "muon" else []
    )
    without = Setup(config=MoEOptimConfig(), args=SimpleNamespace(optimizer=optimizer))
    assert remarks(without, "note") == []


@pytest.mark.parametrize("name", ["hybrid_context_parallel", "sft", "fim_data"])
def test_moe_optim_train_refuses_what_it_would_do_otherwise(name):
    flags = {"sft": False, "fim_data": False, "optimizer": "adam"}
    setup = Setup(config=MoEOptimConfig(), args=SimpleNamespace(**flags))
    assert refusals(setup) == []
    vars(setup.args)[name] = True
    (line,) = refusals(setup)
    assert line.startswith(f"--{name.replace('_', '-')}: only whole sequences of plain text")


def test_moe_optim_train_refuses_parts_of_sequences_for_megatrons_own_attention():
    args = SimpleNamespace(optimizer="adam", context_parallel_size=2, transformer_impl="local")
    (line,) = refusals(Setup(config=MoEOptimConfig(), args=args))
    assert line.startswith("--context-parallel-size with --transformer-impl local: Megatron's own")
    args.transformer_impl = "transformer_engine"
    assert refusals(Setup(config=MoEOptimConfig(), args=args)) == []


def test_the_table_is_well_formed():
    names = [(rule.name, rule.effect) for rule in RULES]
    assert len(set(names)) == len(names)
    for rule in RULES:
        assert (rule.remedy[0].isupper() or rule.remedy.startswith("{step};")) and rule.reason
        assert not rule.remedy.endswith(".") and not rule.reason.endswith(".")


def test_values_of_muon_are_those_that_its_step_has():
    """A rule names each, since rules import no formats."""
    from moe_optim.formats.reference import newton_schulz

    assert set(rules.MUON_VALUES["muon_coefficient_type"]) == set(newton_schulz.COEFFICIENTS)
    assert set(rules.MUON_VALUES["muon_scale_mode"]) == set(get_args(newton_schulz.ScaleMode))
    assert set(rules.MUON_VALUES["muon_fp32_matmul_prec"]) == set(get_args(newton_schulz.Precision))
