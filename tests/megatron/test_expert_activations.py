"""Whatever activation is asked for, experts compute what Megatron's sequential ones do."""

from typing import Any

import pytest
import torch

from tests.support import experts
from tests.support.ranks import run_ranks
from tests.support.training import assert_same_tensors

OPTIONS = {
    "clamp": {"activation_func_clamp_value": 1.5},
    "offset": {"glu_linear_offset": 1.0},
    "biases": {"add_bias_linear": True},
    "fused": {"bias_activation_fusion": True},
    "input in FP8": {"activation_func_fp8_input_store": True},
}
CASES = {  # activation, options
    "SwiGLU": [
        (),
        ("fused",),
        ("fused", "input in FP8"),
        ("clamp",),
        ("clamp", "offset", "biases"),
    ],
    "quick-GeGLU": [
        (*fused, *options)
        for fused in ((), ("fused",))
        for options in ((), ("clamp",), ("offset",), ("clamp", "offset", "biases"))
    ],
}
NAMED_CASES = [
    pytest.param((activation, options), id=" ".join([activation, *options]))
    for activation, all_options in CASES.items()
    for options in all_options
]
LAYOUTS = ("grouped", "indexed")


def _run_all() -> dict[Any, dict[str, dict[str, torch.Tensor]]]:
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    # Megatron's own experts add their second bias in place, which torch refuses at 1 rank
    experts.start_ranks(expert_model_parallel_size=2)
    activations = {"SwiGLU": torch.nn.functional.silu, "quick-GeGLU": quick_gelu}
    results = {}
    for activation, options in [case.values[0] for case in NAMED_CASES]:
        changes = {"activation_func": activations[activation], "expert_model_parallel_size": 2}
        for option in options:
            changes |= OPTIONS[option]
        config = experts.make_config(**changes)
        built = {"stock": experts.make_stock(config)}
        built |= {layout: experts.make_ours(config, expert_layout=layout) for layout in LAYOUTS}
        for module in built.values():
            experts.randomize_biases(module)
        results[activation, options] = {
            who: experts.run_passes(module).tensors() for who, module in built.items()
        }
    return results


@pytest.fixture(scope="module")
def results() -> dict[Any, dict[str, dict[str, torch.Tensor]]]:
    """Return the passes of Megatron's experts and ours, by case."""
    return run_ranks(2, _run_all)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", NAMED_CASES)
def test_passes_are_megatrons_to_the_bit(results, case, layout):
    """Outputs, gradients of tokens and routing weights, and those of all parameters."""
    assert_same_tensors(results[case][layout], results[case]["stock"], what="passes")


def test_every_option_makes_a_difference(results):
    """Otherwise a test above could pass on an option that is ignored. Fusion keeps more bits in
    between, and FP8 is only what the backward pass reads."""
    tensors = {case: passes["stock"] for case, passes in results.items()}
    for activation, all_options in CASES.items():
        plain = tensors[activation, ()]["dgrad"]
        for options in all_options[1:]:
            assert not torch.equal(tensors[activation, options]["dgrad"], plain), options
    assert not torch.equal(tensors["SwiGLU", ()]["output"], tensors["quick-GeGLU", ()]["output"])
