"""Whatever activation is asked for, experts compute what Megatron's sequential ones do."""

from typing import Any

import pytest
import torch

from moe_optim.experts.activation import remove_interleaving
from tests.support.bytes import assert_bytes_equal
from tests.support.modules import experts
from tests.support.ranks import run_ranks
from tests.support.training import assert_same_tensors

OPTIONS = {
    "clamp": {"activation_func_clamp_value": 1.5},
    "offset": {"glu_linear_offset": 1.0},
    "biases": {"add_bias_linear": True},
    "fused": {"bias_activation_fusion": True},
    "input in FP8": {"activation_func_fp8_input_store": True},
    "probs on input": experts.PROBS_ON_INPUT,
    "delayed": {},
}
CASES = {  # activation, options
    "SwiGLU": [
        (),
        ("fused",),
        ("fused", "input in FP8"),
        ("clamp",),
        ("clamp", "biases"),
        ("offset", "biases"),  # which Megatron's newer versions refuse beside a clamp
        ("probs on input",),
        ("probs on input", "fused", "delayed"),
        ("probs on input", "biases"),
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
        config.delay_wgrad_compute = "delayed" in options  # without the schedule that asks for it
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


# Gate and linear half in turn

INTERLEAVE_SIZE = 16


def interleaved_rows() -> list[int]:
    """Return where each row of an interleaved first linear stands in one of halves."""
    rows = []
    for first in range(0, experts.FFN, INTERLEAVE_SIZE):
        gate = range(first, first + INTERLEAVE_SIZE)
        rows += [*gate, *(experts.FFN + row for row in gate)]
    return rows


def _compare_interleaved(knobs: dict[str, str]) -> list[dict[str, torch.Tensor]]:
    """Return the passes of experts in halves, and of the same experts interleaved."""
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    experts.start_ranks()
    changes = {"activation_func": quick_gelu}
    for options in OPTIONS["clamp"], OPTIONS["offset"], OPTIONS["biases"]:
        changes |= options
    halves = experts.make_ours(experts.make_config(**changes), **knobs)
    changes |= {"moe_mlp_glu_interleave_size": INTERLEAVE_SIZE}
    interleaved = experts.make_ours(experts.make_config(**changes), **knobs)
    experts.randomize_biases(halves)
    mine = experts.values_of(interleaved)
    for name, values in experts.values_of(halves).items():
        mine[name].copy_(values[interleaved_rows()] if "linear_fc1" in name else values)
    return [experts.run_passes(module).tensors() for module in (halves, interleaved)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_interleaved_experts_are_those_of_their_halves(layout):
    """Rows in another order give the same outputs, and gradients in that order."""
    ((halves, interleaved),) = run_ranks(1, _compare_interleaved, {"expert_layout": layout})
    for name in halves.keys() - {"dgrad"}:  # it sums over rows, in their order
        if "linear_fc1" in name:
            halves[name] = halves[name][interleaved_rows()]
    torch.testing.assert_close(interleaved.pop("dgrad"), halves.pop("dgrad"))
    assert_same_tensors(interleaved, halves, what="interleaved")


@pytest.mark.parametrize("size", [1, 16, 96])
def test_columns_are_put_in_order_as_megatron_does(size):
    from megatron.core.transformer.moe.experts import TEGroupedMLP

    hidden = torch.randn(7, 2 * experts.FFN, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = TEGroupedMLP._remove_glu_interleaving(hidden, size)
    assert_bytes_equal(remove_interleaving(hidden, size), expected)


def _compare_with_fusion() -> list[dict[str, torch.Tensor]]:
    experts.start_ranks()
    changes = {"moe_mlp_glu_interleave_size": INTERLEAVE_SIZE, **OPTIONS["biases"]}
    configs = [experts.make_config(**changes, **fused) for fused in ({}, OPTIONS["fused"])]
    return [experts.run_passes(experts.make_ours(config)).tensors() for config in configs]


def test_interleaved_experts_go_step_by_step_where_fusion_is_asked_for():
    """As in Megatron's grouped experts, whose fused activations know no interleaving."""
    ((plain, fused),) = run_ranks(1, _compare_with_fusion)
    assert_same_tensors(fused, plain, what="fused")
