"""Converted experts: each element is where the layout's definition, written by hand, puts it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import moe_optim
from moe_optim.errors import LayoutError
from moe_optim.experts.keys.conversion import convert_expert_set, convert_state_dict
from moe_optim.experts.keys.finding import find_expert_sets
from moe_optim.experts.keys.layouts import get_layout
from tests.support.bytes import assert_bytes_equal, assert_same_tensors
from tests.support.modules.expert_states import (
    ALL_LAYOUTS,
    FUSED_LAYOUTS,
    PREFIX,
    make_experts,
    make_state,
    shapes_of,
)

DTYPES = [torch.bfloat16, torch.float32, torch.uint8, torch.float8_e4m3fn]


@st.composite
def cases(draw):
    """Two layouts, a state in each, and how their rows alternate."""
    source, target = draw(st.sampled_from(ALL_LAYOUTS)), draw(st.sampled_from(ALL_LAYOUTS))
    num_experts, ffn, hidden = (draw(st.integers(1, limit)) for limit in (3, 6, 3))
    blocks = [None, *(size for size in range(1, ffn + 1) if ffn % size == 0)]
    interleaves = [
        draw(st.sampled_from(blocks)) if name in FUSED_LAYOUTS else None
        for name in (source, target)
    ]
    bias = draw(st.booleans()) and "legacy" not in (source, target)
    dtype = draw(st.sampled_from(DTYPES))
    experts = make_experts(num_experts, ffn, hidden, bias=bias, dtype=dtype)
    return experts, (source, interleaves[0]), (target, interleaves[1])


@given(cases())
@settings(max_examples=100)
def test_every_layout_becomes_every_other_and_back(case):
    """For all ordered pairs of layouts, block sizes and dtypes, to the bit."""
    experts, (source, source_interleave), (target, target_interleave) = case
    state = make_state(experts, source, interleave=source_interleave)
    want = make_state(experts, target, interleave=target_interleave)
    there = {"source_interleave": source_interleave, "target_interleave": target_interleave}
    back = {"source_interleave": target_interleave, "target_interleave": source_interleave}
    size = {"num_experts": len(experts.gate)}
    got = convert_state_dict(state, get_layout(target), **there, **size)
    assert_same_tensors(got, want)
    assert_same_tensors(moe_optim.convert_state_dict(got, source, **back, **size), state)


@pytest.mark.parametrize("source", ALL_LAYOUTS)
def test_tensors_of_any_kind_convert_into_memory_of_their_own(source):
    """Strided tensors, parameters and shapes without memory, of all experts and of some, into
    every layout; the input stays as it is."""
    experts = make_experts(5, 4, 3)
    state = make_state(experts, source)
    strided = {
        key: value.repeat_interleave(2, dim=-1).flip(0).contiguous().flip(0)[..., ::2]
        for key, value in state.items()
    }
    parameters = {key: torch.nn.Parameter(value) for key, value in state.items()}
    meta = {key: value.to("meta") for key, value in state.items()}
    (expert_set,) = find_expert_sets(shapes_of(state), num_experts=5)
    for name in ALL_LAYOUTS:
        target, want = get_layout(name), make_state(experts, name)
        for tensors in (state, strided, parameters):
            before = dict(tensors)
            got = convert_state_dict(tensors, target, num_experts=5)
            assert_same_tensors(got, want)
            assert tensors.keys() == before.keys()
            assert all(tensors[key] is value for key, value in before.items())
            memories = [one.untyped_storage() for one in got.values()]
            assert len({one.data_ptr() for one in (*memories, *state.values())}) == len(
                [*got, *state]
            )
            for memory, one in zip(memories, got.values(), strict=True):
                assert one.is_contiguous() and memory.nbytes() == one.nbytes
                assert not one.requires_grad
        planned = convert_state_dict(meta, target, num_experts=5)
        assert shapes_of(planned) == shapes_of(want)
        assert all(value.is_meta for value in planned.values())
        some = convert_expert_set(strided, expert_set, target, experts=range(2, 4))
        assert_same_tensors(some, make_state(experts.take(slice(2, 4)), name))


# Whole state dicts


def test_all_layers_convert_and_everything_else_passes_by_reference():
    """Layers in different layouts; order is that of the first key of each layer."""
    first, second = make_experts(2, 2, 3), make_experts(2, 2, 3, first=500)
    others = {
        "embedding.weight": torch.ones(2),
        "decoder.layers.0.mlp.shared_experts.linear_fc1.weight": torch.ones(4),
        "decoder.layers.0.mlp.experts_bias": "text",
        "iteration": 3,
    }
    names = list(others)
    extra = {f"{PREFIX}linear_fc1._extra_state": b"", f"{PREFIX}linear_fc2._extra_state1": None}
    other = "optimizer.state.exp_avg.decoder.layers.0.mlp.experts."
    state = {names[0]: others[names[0]]}
    state |= make_state(first, "sequential", prefix=other)
    state |= {name: others[name] for name in names[1:3]}
    state |= {**make_state(second, "hf"), **extra, names[3]: others[names[3]]}
    got = convert_state_dict(state, get_layout("grouped"))
    want = {names[0]: None, **make_state(first, "grouped", prefix=other)}
    want |= {names[1]: None, names[2]: None, **make_state(second, "grouped"), names[3]: None}
    assert list(got) == list(want)
    for key, value in want.items():
        if value is None:
            assert got[key] is others[key]
        else:
            assert_bytes_equal(got[key], value, what=key)


def test_only_the_named_containers_convert():
    """A container that is named and empty is a fault."""
    state = make_state(make_experts(2, 2, 3), "hf", prefix="student.experts.")
    teacher = make_state(make_experts(2, 2, 3), "hf", prefix="teacher.experts.")
    broken = {"other.experts.weight01": torch.ones(1)}
    got = convert_state_dict(
        {**state, **teacher, **broken}, get_layout("indexed"), prefixes=["student.experts."]
    )
    assert {**teacher, **broken}.items() <= got.items()
    assert "student.experts.linear_fc2.weight1" in got
    with pytest.raises(LayoutError, match=r"pupil.experts.: expected weights of experts there"):
        convert_state_dict(state, get_layout("hf"), prefixes=["pupil.experts."])


# Refusing


REFUSED = {
    "biases into a layout without": (
        lambda: make_state(make_experts(2, 2, 3, bias=True), "grouped"),
        {"to": get_layout("legacy")},
        [
            rf"{PREFIX}linear_fc1.bias: expected no biases, which layout legacy cannot hold",
            rf"{PREFIX}linear_fc2.bias: expected no biases",
        ],
    ),
    "rows that do not divide": (
        lambda: make_state(make_experts(2, 3, 3), "grouped"),
        {"source_interleave": 2},
        [r"blocks of rows that divide 3, the width of its experts, got interleaving by 2"],
    ),
    "interleaving what is apart": (
        lambda: make_state(make_experts(2, 2, 3), "hf_per_expert"),
        {"source_interleave": 1},
        [rf"{PREFIX}: layout hf_per_expert stores gate and up separately, got interleaving"],
    ),
    "mixed dtypes and a text": (
        lambda: {
            **make_state(make_experts(3, 2, 3), "indexed"),
            PREFIX + "linear_fc2.weight1": torch.ones(3, 2, dtype=torch.bfloat16),
            **make_state(make_experts(1, 2, 3), "sequential", prefix="experts."),
            "experts.local_experts.0.linear_fc2.weight": "text",
        },
        {},
        [
            rf"{PREFIX}linear_fc2.weight1: expected torch.float32 on cpu as "
            rf"{PREFIX}linear_fc1.weight0, got torch.bfloat16 on cpu",
            r"experts.local_experts.0.linear_fc2.weight: expected a tensor \[3, 2\], got something",
        ],
    ),
}


@pytest.mark.parametrize(("make", "changes", "messages"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_converted_is_refused_with_every_fault(make, changes, messages):
    state = make()
    before = dict(state)
    with pytest.raises(LayoutError) as refusal:
        convert_state_dict(state, **{"to": get_layout("indexed")} | changes)
    for message in messages:
        assert refusal.match(message)
    assert f"got {len(messages)} fault(s)" in str(refusal.value)
    assert state == before


def test_experts_and_tensors_must_be_those_of_the_set():
    """A set found in one state dict does not read another."""
    state = make_state(make_experts(2, 2, 3), "indexed")
    (expert_set,) = find_expert_sets(shapes_of(state))
    for experts in (range(0), range(1, 3), range(-1, 1), range(0, 2, 2)):
        with pytest.raises(LayoutError, match=r"expected some of experts 0 to 1, got range"):
            convert_expert_set(state, expert_set, get_layout("hf"), experts=experts)
    smaller = make_state(make_experts(1, 2, 3), "indexed")
    with pytest.raises(LayoutError, match=r"linear_fc1.weight1: missing, expected beside"):
        convert_expert_set(smaller, expert_set, get_layout("hf"))
    wider = make_state(make_experts(2, 2, 4), "indexed")
    with pytest.raises(LayoutError, match=r"linear_fc2.weight1: expected \[3, 2\] \(H, F\), got"):
        convert_expert_set(wider, expert_set, get_layout("hf"))
