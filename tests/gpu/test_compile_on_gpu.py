"""Inductor on a GPU gives the bits of a run without compiling, as ``aot_eager`` does on a CPU."""

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.fusions.fused_bias_geglu import quick_gelu

import moe_optim
from moe_optim.errors import StateError
from moe_optim.formats import DIRECTIONS, FORMATS, MXFP8, BlockScaledFormat, reference
from moe_optim.weights.storage import Weights
from tests.support.bytes import assert_bytes_equal, assert_same_tensors
from tests.support.inputs import wide_range_weights, with_specials
from tests.support.modules import experts
from tests.support.modules.compiling import (
    Compiled,
    compiling,
    enable_compiler,
    make_linear,
    make_tokens,
    rewrite,
    run_passes,
)
from tests.support.states.buckets import bind

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

every_format = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS.keys())
every_layout = pytest.mark.parametrize("layout", ["grouped", "indexed"])
SHAPE = (4, 256, 128)
COUNTS = (40, 0, 24, 64)


@pytest.fixture(autouse=True)
def compiler():
    """Let this process compile, and start each test without graphs of another."""
    with compiling(), torch._dynamo.config.patch(error_on_recompile=True):
        yield


@every_format
@pytest.mark.parametrize(
    "quantize", [moe_optim.quantize, reference.quantize], ids=["ops", "oracle"]
)
def test_quantizing_and_dequantizing_give_the_same_bytes(format: BlockScaledFormat, quantize: Any):
    """With kernels and with plain torch, and of other values by the same graph."""

    def both(master: torch.Tensor) -> tuple[Any, ...]:
        quantized = quantize(master, format)
        values = [moe_optim.dequantize(quantized, direction) for direction in DIRECTIONS]
        exact = [reference.dequantize(quantized, direction) for direction in DIRECTIONS]
        return quantized, torch.stack(values), torch.stack(exact)

    compiled = Compiled(both, "inductor")
    for seed in range(2):
        master = with_specials(wide_range_weights(2, 256, 384, seed=seed)).cuda()
        got, want = compiled(master), both(master)
        assert_same_tensors(got[0].buffers(), want[0].buffers(), what=format.name)
        assert_bytes_equal(got[1], want[1], what="bf16")
        assert_bytes_equal(got[2], want[2], what="fp32")
    assert compiled.graphs == 1


KINDS = {
    "bf16": (None, None),
    "computing in mxfp8": (None, MXFP8),
    **{name: (format, None) for name, format in FORMATS.items()},
}
"""Format of storage and of products."""


@every_layout
@pytest.mark.parametrize(("format", "compute"), KINDS.values(), ids=KINDS.keys())
def test_products_and_gradients_are_the_same(
    format: BlockScaledFormat | None, compute: BlockScaledFormat | None, layout: str
):
    linear = make_linear(format, layout, compute=compute, shape=SHAPE, device="cuda")
    compiled = Compiled(linear, "inductor")
    for seed in range(2):
        rewrite(linear, seed)
        got, want = (run_passes(call, linear, COUNTS) for call in (compiled, linear))
        assert_same_tensors(got, want)
    assert compiled.graphs == 1


@pytest.mark.parametrize("format", [None, MXFP8], ids=["bf16", "mxfp8"])
def test_graphs_that_replay_cuda_graphs_follow_the_weights(format: BlockScaledFormat | None):
    """Products stay outside of what is replayed: they see new weights, and find stale ones."""
    linear = make_linear(format, shape=SHAPE, device="cuda")

    def scaled(tokens: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return linear(tokens * 2, ends) * 0.5

    compiled = torch.compile(scaled, fullgraph=True, mode="reduce-overhead")

    def call(tokens: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(tokens, ends)

    for seed in range(5):  # recorded by the third
        rewrite(linear, seed)
        got = {name: tensor.clone() for name, tensor in run_passes(call, linear, COUNTS).items()}
        assert_same_tensors(got, run_passes(scaled, linear, COUNTS), what=f"run {seed}")
    if format is not None:
        bind(linear.storage).is_now(Weights.STALE)
        with pytest.raises(StateError, match="start_param_sync"):
            call(*make_tokens(linear, COUNTS))


GELU = {"activation_func": quick_gelu}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{
        format: ({}, {"format": format})
        for format in ("bf16", *FORMATS)
        if format != "int4_g128"  # blocks of 128 do not fit these experts
    },
    "indexed": ({}, {"format": "nvfp4", "expert_layout": "indexed"}),
    "computing in mxfp8": ({}, {"compute": "mxfp8"}),
    "fused SwiGLU": ({"bias_activation_fusion": True}, {"format": "mxfp8"}),
    "fused quick-GeGLU": ({"bias_activation_fusion": True, **GELU}, {"format": "mxfp8"}),
    "quick-GeGLU": (GELU, {"format": "mxfp8"}),
    "biases": ({"add_bias_linear": True}, {"format": "mxfp8"}),
    "biases, clamps, interleaving": (
        {
            "add_bias_linear": True,
            "activation_func_clamp_value": 0.5,
            "glu_linear_offset": 1.0,
            "moe_mlp_glu_interleave_size": 32,
        },
        {"format": "fp8_block"},
    ),
}
"""Of experts: changes to Megatron's configuration, and knobs."""


def _run_experts(out: Path) -> None:
    """Save what all cases give without compiling and compiled, twice each, with other weights."""
    from megatron.core import parallel_state

    torch.cuda.set_device(0)
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    found: dict[str, Any] = {}
    for name, (changes, knobs) in CASES.items():
        enable_compiler()
        module = experts.make_ours(experts.make_config(**changes), **knobs)
        for parameter_name, parameter in module.named_parameters():
            if "bias" in parameter_name:
                parameter.data.copy_(torch.randn(parameter.shape))
        eager, compiled = module.forward, Compiled(module.forward, "inductor")
        found[name] = []
        for seed in range(2):
            for linear in (module.linear_fc1, module.linear_fc2):
                rewrite(linear, seed)
            passes = []
            for module.forward in (eager, compiled):
                passes.append(experts.run_passes(module, seed=seed, device="cuda").tensors())
                module.zero_grad()
            found[name].append((*passes, compiled.graphs))
    torch.save(found, out)
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def passes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what all cases gave, in a process of its own: Megatron keeps global state."""
    out = tmp_path_factory.mktemp("experts") / "passes.pt"
    process = multiprocessing.get_context("spawn").Process(target=_run_experts, args=(out,))
    process.start()
    process.join(timeout=600)
    process.kill()
    assert out.exists(), f"exit code {process.exitcode}"
    found: dict[str, Any] = torch.load(out, weights_only=False)
    return found


@pytest.mark.parametrize("case", CASES)
def test_whole_experts_are_the_same(passes: dict[str, Any], case: str):
    """Outputs and all gradients, and one graph for both steps."""
    for eager, compiled, graphs in passes[case]:
        assert eager["output"].any()
        assert_same_tensors(compiled, eager, what=case)
        assert graphs == 1
