"""Experts load from any layout, those of this rank or of all ranks, or nothing loads."""

from itertools import product
from typing import Any

import pytest
import torch

from moe_optim.errors import LayoutError
from moe_optim.experts.keys.layouts import ExpertSet, get_layout
from moe_optim.experts.loading import LocalExperts
from moe_optim.formats import MXFP8
from moe_optim.formats.reference import quantize
from tests.support.bytes import assert_bytes_equal
from tests.support.modules import experts as real
from tests.support.modules.expert_modules import FFN, HIDDEN, LOCAL, Experts, assert_same
from tests.support.modules.expert_states import ALL_LAYOUTS, PREFIX, make_experts, make_state
from tests.support.ranks import run_ranks

every_source = pytest.mark.parametrize("source", ALL_LAYOUTS)
TARGETS = ("grouped", "indexed")
every_target = pytest.mark.parametrize("target", TARGETS)


def place(
    target="grouped", *, ep=(0, 1), tp=(0, 1), interleave=None, bias=False, ffn=FFN, prefix=PREFIX
):
    """Return what a rank holds of experts of width ``ffn``."""
    own = ExpertSet(
        prefix=prefix,
        layout=get_layout(target),
        num_experts=LOCAL,
        hidden=HIDDEN,
        ffn=ffn // tp[1],
        has_bias=bias,
    )
    return LocalExperts(own=own, interleave=interleave, ep=ep, tp=tp)


# What a rank takes


@every_source
def test_every_rank_takes_its_experts_of_all_or_its_own(source):
    """Of six experts over three expert-parallel ranks, with biases where the layout has them."""
    bias = source != "legacy"
    experts = make_experts(3 * LOCAL, FFN, HIDDEN, bias=bias)
    for target, rank in product(TARGETS, range(3)):
        mine = experts.take(slice(rank * LOCAL, rank * LOCAL + LOCAL))
        local = place(target, ep=(rank, 3), bias=bias)
        for given in (experts, mine):
            assert_same(local.take_from(make_state(given, source)), make_state(mine, target))


@every_source
def test_whole_experts_are_cut_for_tensor_parallel_ranks(source):
    """Gate and up apart, the columns of fc2, its bias not at all; parts are taken as they are.

    Biases are those of the state: if the model has others, torch reports it. With expert
    parallelism of 2 times expert tensor parallelism of 2 ranks take their part of their experts.
    """
    has_bias = source != "legacy"
    experts = make_experts(LOCAL, FFN, HIDDEN, bias=has_bias)
    for target, rank, bias in product(TARGETS, range(2), (True, False)):
        cut, local = experts.cut(rank, 2), place(target, tp=(rank, 2), bias=bias)
        for given in (experts, cut):
            assert_same(local.take_from(make_state(given, source)), make_state(cut, target))
    if has_bias:
        whole = make_experts(2 * LOCAL, FFN, HIDDEN, bias=True)
        mine = whole.take(slice(LOCAL, None))
        local, want = place(ep=(1, 2), tp=(1, 2), bias=True), make_state(mine.cut(1, 2), "grouped")
        for given in (whole, mine, whole.cut(1, 2), mine.cut(1, 2)):
            assert_same(local.take_from(make_state(given, source)), want)


@every_source
def test_rows_alternate_as_in_the_model_only_in_layouts_that_megatron_stores_alike(source):
    """All others have gate rows first, as exports and conversions under those names do."""
    bias = source != "legacy"
    experts = make_experts(LOCAL, FFN, HIDDEN, bias=bias)
    rows = 2 if source in ("grouped", "indexed", "sequential") else None
    for target in TARGETS:
        local = place(target, interleave=2, bias=bias)
        taken = local.take_from(make_state(experts, source, interleave=rows))
        assert_same(taken, make_state(experts, target, interleave=2))


WRONG = {  # number, width and hidden size of what is given -> what the error calls it
    "fewer experts": ((1, FFN, HIDDEN), r"got 1 of \[3, 4\] in {layout} layout"),
    "neither its own nor all": ((3, FFN, HIDDEN), r"got 3 of \[3, 4\] in {layout} layout"),
    "another width": ((LOCAL, 6, HIDDEN), r"got 2 of \[3, 6\] in {layout} layout"),
    "another hidden size": ((LOCAL, FFN, 5), r"got 2 of \[5, 4\] in {layout} layout"),
}


@pytest.mark.parametrize(("sizes", "message"), WRONG.values(), ids=WRONG.keys())
def test_other_numbers_and_sizes_are_refused_with_both(sizes, message):
    expected = r"expected 2 or 8 experts, .*of hidden size and width \[3, 2 or 4\], "
    for source in set(ALL_LAYOUTS) - {"legacy"}:
        state = make_state(make_experts(*sizes), source)
        with pytest.raises(LayoutError, match=expected + message.format(layout=source)):
            place(ep=(1, 4), tp=(0, 2)).take_from(state)


def test_legacy_experts_that_may_be_cut_in_two_ways_are_refused():
    """Two whole experts have the shapes of four halves: nothing tells which they are."""
    state = make_state(make_experts(LOCAL, FFN, HIDDEN), "legacy")
    with pytest.raises(LayoutError, match=r"got 2 of \[3, 4\] .* or 4 of \[3, 2\] in legacy"):
        place(ep=(0, 2), tp=(0, 2)).take_from(state)
    with pytest.raises(LayoutError, match=r"weight1: expected \[3, 16\] .*got \[3, 15\]"):
        state[PREFIX + "weight1"] = torch.ones(3, 15)
        place(ep=(0, 2)).take_from(state)


# Through load_state_dict


def model_of(experts):
    return torch.nn.ModuleDict({"router": torch.nn.Linear(2, 2), "experts": experts})


def values_of(module):
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def whole_state(model, experts, layout, **others):
    """Return a state dict of a model with these experts, extra states and other entries."""
    state = {k: v + 1 for k, v in values_of(model).items() if k.startswith("router")}
    state |= make_state(experts, layout, prefix="experts.")
    extra = {f"experts.linear_fc1._extra_state{i}": None for i in range(2 * LOCAL)}
    return state | extra | others


@every_source
@every_target
def test_load_state_dict_takes_any_layout_and_leaves_the_callers_dict_alone(source, target):
    """Strictly, as a part of a model and alone, with every rank's extra states in between."""
    experts = make_experts(2 * LOCAL, FFN, HIDDEN, bias=source != "legacy", dtype=torch.bfloat16)
    want = make_state(experts.take(slice(LOCAL, None)), target, prefix="")
    for alone in (False, True):
        module = Experts(target, ep=(1, 2), bias=source != "legacy")
        model = model_of(module)
        state = whole_state(model, experts, source)
        before = dict(state)
        if alone:
            mine = {k.removeprefix("experts."): v for k, v in state.items() if "router" not in k}
            module.load_state_dict(mine)
        else:
            model.load_state_dict(state)
            assert_bytes_equal(model["router"].weight.data, state["router.weight"])
        assert_same(values_of(module), want)
        assert list(state) == list(before)
        assert all(state[key] is value for key, value in before.items())


@every_target
def test_a_state_of_the_same_experts_is_taken_as_it_is(target, monkeypatch):
    """With its extra states, which are dropped, and without a search for layouts."""
    experts = make_experts(LOCAL, FFN, HIDDEN, bias=True, dtype=torch.bfloat16)
    own = make_state(experts, target, prefix="")
    extra = {f"{fc}._extra_state{n}": None for fc in ("linear_fc1", "linear_fc2") for n in (0, 1)}
    module = Experts(target, bias=True)
    monkeypatch.delattr(LocalExperts, "of")
    module.load_state_dict(own | extra)
    assert_same(values_of(module), own)


def test_torch_reports_what_is_missing_and_unexpected_as_for_any_module():
    """Keys of no layout, biases that the model does not have, and experts missing altogether."""
    experts = make_experts(LOCAL, FFN, HIDDEN, bias=True, dtype=torch.bfloat16)
    model = model_of(Experts())
    state = whole_state(model, experts, "indexed", **{"experts.linear_fc1.amax": torch.ones(1)})
    del state["router.bias"]
    with pytest.raises(RuntimeError) as refusal:
        model.load_state_dict(state)
    assert 'Missing key(s) in state_dict: "router.bias".' in str(refusal.value)
    unexpected = ("linear_fc1.bias", "linear_fc1.amax", "linear_fc2.bias")
    names = ", ".join(f'"experts.{key}"' for key in unexpected)
    assert set(names.split(", ")) == {
        f'"experts.{key}"' for key in unexpected if f'"experts.{key}"' in str(refusal.value)
    }
    result = model.load_state_dict(state, strict=False)
    assert result.missing_keys == ["router.bias"]
    assert set(result.unexpected_keys) == {f"experts.{key}" for key in unexpected}
    want = make_state(experts, "grouped", prefix="experts.")
    assert_bytes_equal(model["experts"].linear_fc2.weight.data, want["experts.linear_fc2.weight"])
    result = model.load_state_dict({}, strict=False)
    assert "experts.linear_fc1.weight" in result.missing_keys


REFUSED_LOADS = {
    "a gap": {"experts.linear_fc1.weight1": "experts.linear_fc1.weight2"},
    "a name of no layout": {"experts.linear_fc1.weight1": "experts.linear_fc1.weight01"},
    "of two layouts": {"experts.linear_fc1.weight1": "experts.local_experts.1.linear_fc1.weight"},
}


@pytest.mark.parametrize("renamed", REFUSED_LOADS.values(), ids=REFUSED_LOADS.keys())
@pytest.mark.parametrize("strict", [True, False])
def test_a_refused_state_leaves_the_experts_as_they_were(renamed, strict):
    """Also where torch is told to be lenient: half of the experts is never what was meant."""
    module = Experts("indexed")
    state = make_state(make_experts(LOCAL, FFN, HIDDEN, dtype=torch.bfloat16), "indexed", prefix="")
    state = {"experts." + key: value for key, value in state.items()}
    state = {renamed.get(key, key): value for key, value in state.items()}
    before = values_of(module)
    with pytest.raises(LayoutError, match=r"experts\.linear_fc1\.weight1: |got a key of"):
        model_of(module).load_state_dict(state, strict=strict)
    assert_same(values_of(module), before)


@every_target
def test_quantized_experts_load_into_and_out_of_any_layout(target):
    """Into the bytes of the values; a quantized model's own state gives what it dequantizes to."""
    generator = torch.Generator().manual_seed(1)
    sizes = {"gate": (2, 64, 32), "up": (2, 64, 32), "down": (2, 32, 64)}
    drawn = {k: torch.randn(v, generator=generator).bfloat16() for k, v in sizes.items()}
    experts = make_experts(LOCAL, 64, 32)
    experts.__dict__.update(drawn)
    loaded = {}
    for source in ALL_LAYOUTS:
        module = loaded[source] = Experts(target, format=MXFP8, ffn=64, hidden=32)
        module.load_state_dict(make_state(experts, source, prefix=""))
        for linear, want in make_state(experts, "grouped", prefix="").items():
            buffers = module.get_submodule(linear.partition(".")[0]).storage.quantized.buffers()
            for name, buffer in quantize(want.float(), MXFP8).buffers().items():
                assert_bytes_equal(buffers[name], buffer, what=f"{source}: {linear}.{name}")
    other = Experts("indexed" if target == "grouped" else "grouped", ffn=64, hidden=32)
    other.load_state_dict(loaded["hf"].state_dict())
    for linear in ("linear_fc1", "linear_fc2"):
        got = other.get_submodule(linear).operand("rowwise")
        want = loaded["hf"].get_submodule(linear).operand("rowwise")
        assert_bytes_equal(got, want, what=linear)


# Portable experts over real process groups


PARALLEL = {
    "expert": (
        {"expert_model_parallel_size": 2},
        lambda whole, rank: whole.take(slice(rank * real.EXPERTS, (rank + 1) * real.EXPERTS)),
    ),
    "expert tensor": ({"expert_tensor_parallel_size": 2}, lambda whole, rank: whole.cut(rank, 2)),
}


def _whole_experts(parallel: dict[str, int]) -> Any:
    count = real.EXPERTS * parallel.get("expert_model_parallel_size", 1)
    return make_experts(count, real.FFN, real.HIDDEN, dtype=torch.bfloat16)


def _load_on_ranks() -> dict[str, list[dict[str, torch.Tensor]]]:
    from megatron.core import parallel_state

    real.start_ranks()
    loaded: dict[str, list[dict[str, torch.Tensor]]] = {}
    for name, (parallel, _) in PARALLEL.items():
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(**parallel)
        cut = {k: v for k, v in parallel.items() if k != "expert_model_parallel_size"}
        for target, source in (("grouped", "sequential"), ("indexed", "hf_transposed")):
            module = real.make_ours(real.make_config(**cut), expert_layout=target)
            state = make_state(_whole_experts(parallel), source, prefix="")
            keys = state.keys()
            module.load_state_dict(state)
            assert state.keys() == keys
            loaded.setdefault(name, []).append(values_of(module))
    return loaded


def test_portable_experts_load_their_part_of_all_experts():
    """Each of two ranks, by its place in Megatron's own process groups."""
    for rank, loaded in enumerate(run_ranks(2, _load_on_ranks)):
        for name, (parallel, part) in PARALLEL.items():
            mine = part(_whole_experts(parallel), rank)
            for target, got in zip(TARGETS, loaded[name], strict=True):
                assert_same(got, make_state(mine, target, prefix=""))
