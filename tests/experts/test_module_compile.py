"""Portable experts are one graph each, and train as without compiling, to the bit."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from moe_optim.config import MoEOptimConfig
from tests.support import training
from tests.support.modules import experts
from tests.support.modules.compiling import Compiled, enable_compiler
from tests.support.ranks import run_ranks
from tests.support.training import OVERLAP, Record, assert_same_run, assert_same_tensors, pretrain

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Case:
    """Changes to Megatron's configuration of the experts, and knobs of ours."""

    changes: dict[str, Any] = field(default_factory=dict)
    knobs: dict[str, Any] = field(default_factory=dict)
    gelu: bool = False


EVERYTHING = {
    "add_bias_linear": True,
    "activation_func_clamp_value": 0.5,
    "glu_linear_offset": 1.0,
    "moe_mlp_glu_interleave_size": 32,
    **experts.PROBS_ON_INPUT,
}
CASES = {
    "bf16": Case(knobs={"format": "bf16"}),
    "nvfp4": Case(knobs={"format": "nvfp4"}),
    "computing in int8": Case(knobs={"compute": "int8_per_expert", "expert_layout": "indexed"}),
    "fused quick-GeGLU, biases": Case(
        {"bias_activation_fusion": True, "add_bias_linear": True}, {"format": "mxfp8"}, gelu=True
    ),
    "biases, clamps, interleaving, probs on input": Case(
        EVERYTHING, {"expert_layout": "indexed"}, gelu=True
    ),
    "gradients through autograd": Case({}, {"format": "mxfp8", "fuse_wgrad_accumulation": False}),
}
ROUTINGS = ((5, 0, 9), (3, 8, 3), (0, 20, 4))
"""Tokens of each expert, a step each: the last has another number of them."""


def _build(case: Case) -> torch.nn.Module:
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    activation = {"activation_func": quick_gelu} if case.gelu else {}
    module = experts.make_ours(experts.make_config(**case.changes, **activation), **case.knobs)
    for name, parameter in module.named_parameters():
        if "bias" in name:
            generator = torch.Generator().manual_seed(len(name))
            parameter.data = torch.randn(parameter.shape, generator=generator).bfloat16()
    return module


def _write_weights(module: torch.nn.Module, seed: int) -> None:
    for linear in (module.linear_fc1, module.linear_fc2):
        generator = torch.Generator().manual_seed(seed)
        linear.load_values(torch.randn(linear.shape, generator=generator).bfloat16() * 0.2)


def _run_all_cases() -> dict[str, list[tuple[dict[str, torch.Tensor], ...]]]:
    """Return of each case and step what eager and compiled passes give, and how many graphs."""
    from moe_optim.integration import cpu_runtime

    enable_compiler()
    experts.start_ranks()
    modules = {name: _build(case) for name, case in CASES.items()}
    cpu_runtime.uninstall()
    found: dict[str, Any] = {}
    for name, module in modules.items():
        enable_compiler()
        eager, compiled = module.forward, Compiled(module.forward)
        found[name] = []
        for seed, counts in enumerate(ROUTINGS):
            _write_weights(module, seed)
            passes = []
            for module.forward in (eager, compiled):
                passes.append(experts.run_passes(module, counts, seed=seed).tensors())
                module.zero_grad()
            found[name].append((*passes, compiled.graphs))
    return found


@pytest.fixture(scope="module")
def passes() -> dict[str, list[Any]]:
    """Return what all cases gave in one rank."""
    return run_ranks(1, _run_all_cases)[0]


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_all_gradients_are_the_same(passes, case):
    """At every step, each of which finds other weights."""
    for eager, compiled, _ in passes[case]:
        assert eager["output"].any()
        assert_same_tensors(compiled, eager, what=case)


def test_only_another_number_of_tokens_compiles_anew_and_once(passes):
    for case in CASES:
        assert [graphs for *_, graphs in passes[case]] == [1, 1, 2], case


# In Megatron's MoE layers

FLAGS = [*OVERLAP, "--train-iters", "3", "--eval-interval", "2"]
CONFIG = MoEOptimConfig(format="mxfp8", expert_layout="indexed")


def _train(compiling: bool) -> Record:
    """Train with the experts of one layer compiled, or without; ``extra`` counts graphs."""
    enable_compiler()
    training.MODEL.remove("--disable-bias-linear")
    compiled = []

    def compile_experts(model: list[Any], _optimizer: Any) -> None:
        from moe_optim.experts.module import GroupedExperts

        enable_compiler()
        for module in model[0].modules():
            if compiling and not compiled and isinstance(module, GroupedExperts):
                module.forward = Compiled(module.forward)
                compiled.append(module.forward)

    return pretrain(
        FLAGS,
        CONFIG,
        after_setup=compile_experts,
        observe=lambda *_: [forward.graphs for forward in compiled],
    )


@pytest.mark.extended
def test_compiled_experts_train_as_without_compiling():
    """Losses, masters, moments and weights of two ranks, with biases, gathers and reductions
    overlapped, evaluations included."""
    compiled, eager = (run_ranks(2, _train, compiling) for compiling in (True, False))
    for rank, (got, want) in enumerate(zip(compiled, eager, strict=True)):
        assert_same_run(got, want, what=f"rank {rank}")
        assert len(got.extra) == 1
        # of a fixed and of a variable number of tokens, for training and for evaluations
        assert all(1 <= graphs <= 4 for graphs in got.extra)
