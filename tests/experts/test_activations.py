"""Whatever activation is asked for, experts compute what Megatron's sequential ones do."""

from collections.abc import Sequence
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


INTERLEAVE_SIZE = 16


def _run_all() -> dict[Any, dict[str, dict[str, torch.Tensor]]]:
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    # Megatron's own experts add their second bias in place, which torch refuses at 1 rank
    experts.start_ranks(expert_model_parallel_size=2)
    activations = {"SwiGLU": torch.nn.functional.silu, "quick-GeGLU": quick_gelu}

    def configure(activation: str, options: Sequence[str], **more: Any) -> Any:
        changes = {"activation_func": activations[activation], "expert_model_parallel_size": 2}
        for option in options:
            changes |= OPTIONS[option]
        return experts.make_config(**changes, **more)

    results = {}
    for activation, options in [case.values[0] for case in NAMED_CASES]:
        config = configure(activation, options)
        built = {"stock": experts.make_stock(config)}
        config.delay_wgrad_compute = "delayed" in options  # without the schedule that asks for it
        built |= {layout: experts.make_ours(config, expert_layout=layout) for layout in LAYOUTS}
        for module in built.values():
            experts.randomize_biases(module)
        results[activation, options] = {
            who: experts.run_passes(module).tensors() for who, module in built.items()
        }
    interleaved = {"moe_mlp_glu_interleave_size": INTERLEAVE_SIZE}
    for layout in LAYOUTS:
        options = ("clamp", "offset", "biases")
        built = {
            name: experts.make_ours(configure("quick-GeGLU", options, **more), expert_layout=layout)
            for name, more in (("halves", {}), ("interleaved", interleaved))
        }
        experts.randomize_biases(built["halves"])
        mine = experts.values_of(built["interleaved"])
        for name, values in experts.values_of(built["halves"]).items():
            mine[name].copy_(values[interleaved_rows()] if "linear_fc1" in name else values)
        results[layout] = {
            name: experts.run_passes(module).tensors() for name, module in built.items()
        }
    for name, options in (("plain", ("biases",)), ("fused", ("biases", "fused"))):
        module = experts.make_ours(configure("SwiGLU", options, **interleaved))
        results[name] = experts.run_passes(module).tensors()
    return results


def interleaved_rows() -> list[int]:
    """Return where each row of an interleaved first linear stands in one of halves."""
    rows = []
    for first in range(0, experts.FFN, INTERLEAVE_SIZE):
        gate = range(first, first + INTERLEAVE_SIZE)
        rows += [*gate, *(experts.FFN + row for row in gate)]
    return rows


@pytest.fixture(scope="module")
def results() -> dict[Any, dict[str, dict[str, torch.Tensor]]]:
    """Return the passes of Megatron's experts and ours, by case."""
    return run_ranks(2, _run_all)[0]


@pytest.mark.parametrize("case", NAMED_CASES)
def test_passes_are_megatrons_to_the_bit(results, case):
    """Outputs, gradients of tokens and routing weights, and those of all parameters."""
    for layout in LAYOUTS:
        assert_same_tensors(results[case][layout], results[case]["stock"], what="passes")


def test_every_option_makes_a_difference(results):
    """Otherwise a test above could pass on an option that is ignored. Fusion keeps more bits in
    between, and FP8 is only what the backward pass reads."""
    for activation, all_options in CASES.items():
        plain = results[activation, ()]["stock"]["dgrad"]
        for options in all_options[1:]:
            dgrad = results[activation, options]["stock"]["dgrad"]
            assert not torch.equal(dgrad, plain), options
    outputs = [results[activation, ()]["stock"]["output"] for activation in CASES]
    assert not torch.equal(*outputs)


# Gate and linear half in turn


@pytest.mark.parametrize("layout", LAYOUTS)
def test_interleaved_experts_are_those_of_their_halves(results, layout):
    """Rows in another order give the same outputs, and gradients in that order."""
    halves, interleaved = results[layout]["halves"], results[layout]["interleaved"]
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


def test_interleaved_experts_go_step_by_step_where_fusion_is_asked_for(results):
    """As in Megatron's grouped experts, whose fused activations know no interleaving."""
    assert_same_tensors(results["fused"], results["plain"], what="fused")
