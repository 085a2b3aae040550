"""Experts are found by exact keys and agreeing shapes, or every fault is named at once."""

from itertools import product

import pytest

from moe_optim.errors import LayoutError
from moe_optim.experts.keys.finding import find_expert_sets
from moe_optim.experts.keys.layouts import ExpertSet, get_layout
from tests.support.modules.expert_states import (
    ALL_LAYOUTS,
    PREFIX,
    make_experts,
    make_state,
    shapes_of,
)

E, F, H = 3, 4, 5


def shapes_in(layout, prefix=PREFIX, *, experts=E, bias=False):
    return shapes_of(make_state(make_experts(experts, F, H, bias=bias), layout, prefix=prefix))


def faults_of(shapes, **arguments):
    """Return the lines of the one error that names every fault."""
    with pytest.raises(LayoutError) as refusal:
        find_expert_sets(shapes, **arguments)
    first, *faults, last = str(refusal.value).splitlines()
    assert first.startswith("expert keys: expected complete sets of one layout each, got ")
    assert first.endswith(f"{len(faults)} fault(s):")
    assert last.startswith("Nothing was converted.")
    return [fault.strip() for fault in faults]


PREFIXES = [
    "",
    "experts.",
    PREFIX,
    "module.module." + PREFIX,
    "optimizer.state.exp_avg." + PREFIX,
    "model.layers.11.block_sparse_moe.experts.",
    "experts.experts.",
    "teacher.experts.0.mlp.experts.",
]


@pytest.mark.parametrize("name", ALL_LAYOUTS)
def test_every_layout_is_recognised_behind_any_prefix(name):
    """With sizes, and the keys and shapes that it was recognised by."""
    for prefix, bias in product(PREFIXES, (False, name != "legacy")):
        shapes = shapes_in(name, prefix, bias=bias)
        (found,) = find_expert_sets(shapes, num_experts=E if name == "legacy" else None)
        sizes = {"num_experts": E, "hidden": H, "ffn": F, "has_bias": bias}
        assert found == ExpertSet(prefix=prefix, layout=get_layout(name), **sizes)
        assert found.shapes() == shapes


EXTRA_STATES = {
    "grouped": "linear_fc1._extra_state",
    "indexed": "linear_fc2._extra_state1",
    "sequential": "local_experts.1.linear_fc2._extra_state",
}


def test_extra_states_belong_to_the_set_beside_them():
    """Whatever they hold; alone they are a fault, since weights must have been lost."""
    for (layout, remainder), shape in product(EXTRA_STATES.items(), (None, (0,), (17,))):
        key = PREFIX + remainder
        (found,) = find_expert_sets({**shapes_in(layout), key: shape})
        assert found.extra_states == (key,)
        assert key not in found.keys
        assert faults_of({key: shape}) == [f"{key}: expected weights of experts there, got none"]


def test_fused_layouts_never_fit_both_ways():
    """Whatever the sizes, also where 2F is H: the shape of down_proj tells which is which."""
    for ffn, hidden, name in product(range(1, 5), range(1, 9), ("hf", "hf_transposed")):
        (found,) = find_expert_sets(shapes_of(make_state(make_experts(1, ffn, hidden), name)))
        assert (found.layout.name, found.ffn, found.hidden) == (name, ffn, hidden)


def test_two_layouts_that_fit_are_ambiguous_unless_one_is_named():
    """A second layout with the keys and shapes of another, as anyone might add."""
    twin = type(get_layout("hf"))(name="twin", patterns=get_layout("hf").patterns)
    shapes = shapes_in("hf")
    keys = [f"{PREFIX}gate_up_proj", f"{PREFIX}down_proj"]
    assert faults_of(shapes, layouts=[get_layout("hf"), twin]) == [
        f"{key}: fits hf and twin. Name the layout." for key in keys
    ]
    (found,) = find_expert_sets(shapes, layouts=[twin])
    assert found.layout is twin


def test_legacy_needs_the_number_of_experts():
    """Its shapes are those of any number that divides them: 12 columns are 2 experts of F = 3,
    or 3 of F = 2, and a number that does not divide is a fault."""
    shapes = {PREFIX + "weight1": (5, 12), PREFIX + "weight2": (6, 5)}
    assert all("Give it" in fault for fault in faults_of(shapes))
    for experts, ffn in [(1, 6), (2, 3), (3, 2), (6, 1)]:
        (found,) = find_expert_sets(shapes, num_experts=experts)
        assert (found.num_experts, found.ffn, found.hidden) == (experts, ffn, 5)
    assert len(faults_of(shapes, num_experts=4)) == 2


@pytest.mark.parametrize("name", [name for name in ALL_LAYOUTS if name != "legacy"])
def test_another_number_of_experts_than_asked_for_is_a_fault(name):
    """Of layouts that number their keys, one fewer and one more; of stacks, by shape."""
    for asked in (E - 1, E + 1):
        faults = faults_of(shapes_in(name), num_experts=asked)
        assert faults and all(fault.startswith(PREFIX) for fault in faults)


def test_only_the_containers_asked_for_are_looked_into():
    """At any prefix, each of which must hold experts; the longest one that fits decides."""
    shapes = {**shapes_in("hf", "a."), **shapes_in("indexed", "a.b."), "a.experts.junk": (1,)}
    (found,) = find_expert_sets(shapes, prefixes=["a.b."])
    assert (found.prefix, found.layout.name) == ("a.b.", "indexed")
    del shapes["a.experts.junk"]
    assert len(find_expert_sets(shapes, prefixes=["a.", "a.b."])) == 2
    assert faults_of(shapes, prefixes=["c."]) == ["c.: expected weights of experts there, got none"]
