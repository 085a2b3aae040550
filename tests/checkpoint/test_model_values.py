"""Experts of a model chunk in a flat state dict: found by whole names, where Megatron guesses."""

from typing import Any

import pytest
import torch

from moe_optim.errors import LayoutError
from moe_optim.experts.keys.conversion import convert_state_dict
from moe_optim.experts.keys.layouts import get_layout
from moe_optim.experts.loading import expert_values_for, expert_values_for_chunks
from moe_optim.formats import MXFP8
from tests.support.bytes import assert_bytes_equal
from tests.support.modules.expert_modules import FFN, HIDDEN, LOCAL, Experts, assert_same
from tests.support.modules.expert_states import make_experts, make_state

LAYERS = "decoder.layers.0.mlp."


def nest(path: str, module: torch.nn.Module) -> torch.nn.Module:
    """Return a module that has another one at a path; the module itself for an empty path."""
    for name in reversed(path.split(".") if path else []):
        outer = torch.nn.Module()
        outer.add_module(name, module)
        module = outer
    return module


def state_of(layout="indexed", *, count=LOCAL, prefix=LAYERS + "experts.", first=0):
    return make_state(make_experts(count, FFN, HIDDEN, first=first), layout, prefix=prefix)


# Names


def test_experts_at_the_root_are_keys_at_the_root():
    others = {
        "a.linear_fc1.weight0": torch.zeros(8, 3),
        "b.linear_fc1.weight1": torch.ones(8, 3),
        "layernorm.weight": torch.ones(2, 3),
    }
    got = expert_values_for(Experts("grouped"), others | state_of(prefix=""))
    assert_same(got, others | state_of("grouped", prefix=""))
    assert all(got[key] is value for key, value in others.items())
    with pytest.raises(LayoutError, match="experts: expected its experts there, got none"):
        expert_values_for(Experts("grouped"), others)


FOREIGN = {
    "a teacher beside the student": f"teacher.{LAYERS}experts.",
    "a name that ends in the same letters": f"text_{LAYERS}experts.",
    "shared experts": f"{LAYERS}shared_experts.",
}


@pytest.mark.parametrize("foreign", FOREIGN.values(), ids=FOREIGN.keys())
def test_experts_under_other_names_are_left_alone(foreign):
    """They stay what they are beside the right ones, and do not stand in for them."""
    others = state_of("indexed", prefix=foreign, first=900)
    for target in ("grouped", "indexed"):
        chunk = nest(f"{LAYERS}experts", Experts(target))
        for state in (others | state_of("hf"), state_of("hf") | others):
            assert_same(expert_values_for(chunk, state), others | state_of(target))
        with pytest.raises(LayoutError, match=r"mlp.experts.: expected its experts there, got"):
            expert_values_for(chunk, others)


WRAPPED = {  # name of the experts in the model -> prefix of the result
    f"module.module.{LAYERS}experts": f"{LAYERS}experts.",
    f"language_model.module.{LAYERS}experts": f"language_model.module.{LAYERS}experts.",
    f"module._orig_mod.{LAYERS}experts": f"_orig_mod.{LAYERS}experts.",
}


@pytest.mark.parametrize(("path", "prefix"), WRAPPED.items())
def test_wrappers_count_neither_in_the_model_nor_in_the_state(path, prefix):
    """Wherever they stand. Results are named as the model's parameters are, which Megatron
    looks for without leading ``module.``"""
    chunk = nest(path, Experts("grouped"))
    outer = "language_model." if "language" in path else ""
    for wrapper in ("", "module.", "_orig_mod.module."):
        state = state_of("sequential", prefix=f"{outer}{wrapper}{LAYERS}experts.")
        assert_same(expert_values_for(chunk, state), state_of("grouped", prefix=prefix))


def test_a_state_with_and_without_wrappers_is_refused():
    chunk = nest(f"{LAYERS}experts", Experts("grouped"))
    state = state_of() | state_of(prefix=f"module.{LAYERS}experts.")
    with pytest.raises(LayoutError) as refusal:
        expert_values_for(chunk, state)
    assert str(refusal.value).count(": expected one entry for ") == len(state_of())


# Interleaved rows


@pytest.mark.parametrize("size", [1, 2, 4])
def test_rows_alternate_as_megatrons_experts_read_them(size):
    """What Megatron's grouped experts make of activations, done to the rows of weights and
    biases. The halves that its checkpoints hold as gate and up are neither."""
    from megatron.core.transformer.moe.experts import TEGroupedMLP

    state = make_state(make_experts(LOCAL, FFN, HIDDEN, bias=True), "indexed", interleave=size)
    got = convert_state_dict(state, get_layout("hf_per_expert"), source_interleave=size)
    for kind in ("weight", "bias"):
        rows = state[f"decoder.layers.3.mlp.experts.linear_fc1.{kind}1"]
        columns = rows.view(2 * FFN, -1).t().contiguous()
        apart = TEGroupedMLP._remove_glu_interleaving(columns, size).t().reshape(rows.shape)
        halves = [got[f"decoder.layers.3.mlp.experts.1.{p}_proj.{kind}"] for p in ("gate", "up")]
        assert_bytes_equal(torch.cat(halves), apart.contiguous(), what=kind)
        assert torch.equal(rows.chunk(2)[0], halves[0]) == (size == FFN)


def test_masters_and_moments_change_their_interleaving_with_the_weights():
    """Behind any prefix of an optimizer's state, so that weights and masters stay the same rows;
    names of quantizers are not taken for weights."""
    experts = {
        prefix: make_experts(LOCAL, FFN, HIDDEN, first=first)
        for prefix, first in {"": 0, "optimizer.state.fp32_param.": 200, "exp_avg.": 400}.items()
    }
    states = [
        {
            key: value
            for prefix, values in experts.items()
            for key, value in make_state(
                values, layout, interleave=size, prefix=f"{prefix}{LAYERS}experts."
            ).items()
        }
        for layout, size in (("grouped", 4), ("indexed", 2))
    ]
    interleave = {"source_interleave": 4, "target_interleave": 2}
    assert_same(convert_state_dict(states[0], get_layout("indexed"), **interleave), states[1])
    amax = f"{LAYERS}experts.linear_fc1.weight_quantizer._amax"
    with pytest.raises(LayoutError, match=f"{amax}: expected a key of layout"):
        convert_state_dict({**states[0], amax: torch.ones(1)}, get_layout("indexed"))


# Forms of state dicts


def test_everything_else_is_passed_on_and_nothing_is_written():
    """In the order of the state; extra states go, quantized weights come as ordinary tensors."""
    experts = Experts("indexed", format=MXFP8, ffn=64, hidden=32)
    chunk = nest(f"module.{LAYERS}experts", experts)
    state: dict[str, Any] = {"first": object()}
    state |= {f"{LAYERS}experts.{key}": value for key, value in experts.state_dict().items()}
    state |= {f"{LAYERS}experts.linear_fc1._extra_state": None, "iteration": 3}
    before = dict(state)
    got = expert_values_for(chunk, state)
    assert list(got) == [key for key in state if not key.endswith("_extra_state")]
    assert got["first"] is state["first"]
    for key, value in got.items():
        if key.startswith(LAYERS):
            assert type(value) is torch.Tensor
            assert_bytes_equal(value, before[key].dequantize(), what=key)
    assert list(state) == list(before)
    assert all(state[key] is value for key, value in before.items())
    assert expert_values_for(torch.nn.Linear(2, 2), state) == state


def test_states_of_other_numbers_of_chunks_are_refused():
    chunks = [nest(f"{LAYERS}experts", Experts()) for _ in range(2)]
    for state in ({"model0": state_of()}, {"model": state_of()}, state_of()):
        with pytest.raises(LayoutError, match="expected the states of 2 chunks, got "):
            expert_values_for_chunks(chunks, state)
