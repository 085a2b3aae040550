"""Amaxes under ModelOpt's keys and ours: the same bits both ways, or all faults at once."""

import copy
import warnings

import pytest
import torch

from moe_optim.calibration.modelopt_amaxes import amaxes_from_modelopt, amaxes_to_modelopt
from moe_optim.errors import LayoutError
from tests.support.bytes import assert_bytes_equal, assert_same_tensors

HIDDEN, FFN = 4, 3
FORMS = ("indexed", "numbered", "sequential", "grouped", "flat")
LAYERS = ("decoder.layers.0.mlp.experts.", "decoder.layers.1.mlp.experts.", "")
"""Of which the last one is a state dict of experts alone."""


def ours(prefix="", experts=3, *, weights=True, first=1.0):
    """Return a layer with amaxes that count from ``first``."""
    amaxes = torch.arange(first, first + 2 * experts).view(2, experts, 1, 1)
    state = {f"{prefix}linear_fc{1 + i}.calibrated_amax": amax for i, amax in enumerate(amaxes)}
    if weights:
        state |= {
            f"{prefix}linear_fc1.weight": torch.zeros(experts, 2 * FFN, HIDDEN),
            f"{prefix}linear_fc2.weight": torch.zeros(experts, HIDDEN, FFN),
        }
    return state


def keys_of(form, linear, experts):
    """Return the keys of ModelOpt's modules, written out."""
    return {
        "indexed": [f"{linear}.weight_quantizer.{i}._amax" for i in range(experts)],
        "numbered": [f"{linear}.weight_quantizer_{i}._amax" for i in range(experts)],
        "sequential": [
            f"local_experts.{i}.{linear}.weight_quantizer._amax" for i in range(experts)
        ],
        "grouped": [f"{linear}.weight_quantizer._amax"],
        "flat": [f"{linear}.weight_quantizer._amax"],
    }[form]


SHAPES = {"indexed": (), "numbered": (), "sequential": (), "grouped": (3, 1, 1), "flat": (3,)}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("prefix", LAYERS)
def test_keys_and_shapes_are_those_of_modelopts_modules(form, prefix):
    state = ours(prefix)
    theirs = amaxes_to_modelopt(state, form)
    keys = [prefix + key for i in (1, 2) for key in keys_of(form, f"linear_fc{i}", 3)]
    weights = [f"{prefix}linear_fc{i}.weight" for i in (1, 2)]
    assert list(theirs) == [*keys, *weights]
    assert {tuple(theirs[key].shape) for key in keys} == {SHAPES[form]}
    values = torch.cat([theirs[key].flatten() for key in keys])
    assert values.tolist() == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("with_weights", [True, False])
def test_the_way_back_gives_the_same_bits(form, with_weights):
    """Of several layers among other entries, which are the same objects; the input stays as it is,
    no result shares its memory, and nothing is warned of."""
    others = {
        "decoder.layers.0.mlp.experts.linear_fc1.output_quantizer._amax": torch.ones(()),
        "decoder.layers.0.mlp.linear_fc1.input_quantizer._amax": torch.ones(()),
        "decoder.layers.0.mlp.shared_experts.linear_fc1.weight_quantizer._amax": torch.ones(5, 1),
        "decoder.layers.0.mlp.linear_fc1.weight_quantizer._amax": torch.ones(()),
        "decoder.layers.0.self_attention.linear_qkv.weight_quantizer._amax": torch.ones(7, 1),
        "iteration": 3,
    }
    state = {**ours(LAYERS[0], weights=with_weights), **others}
    state |= ours(LAYERS[1], 5, weights=with_weights, first=0.0)
    before, addresses = copy.deepcopy(state), {id(value) for value in state.values()}
    with warnings.catch_warnings(action="error"):
        theirs = amaxes_to_modelopt(state, form)
        back = amaxes_from_modelopt(theirs)
    assert list(back) == list(state) == list(before)
    for key, value in before.items():
        if not isinstance(value, torch.Tensor):
            assert back[key] == value
            continue
        assert_bytes_equal(state[key], value, what=f"input {key}")
        assert_bytes_equal(back[key], value, what=key)
        assert (id(back[key]) in addresses) == ("calibrated" not in key)
        assert (back[key].data_ptr() == state[key].data_ptr()) == ("calibrated" not in key)


@pytest.mark.parametrize("form", ["grouped", "flat"])
def test_one_amax_of_all_experts_is_the_scalar_of_one_quantizer(form):
    state = ours()
    state["linear_fc1.calibrated_amax"] = torch.full((1, 1, 1), 3.0)
    state["linear_fc2.calibrated_amax"] = torch.full((1, 1, 1), 6.0)
    theirs = amaxes_to_modelopt(state, form)
    assert [theirs[f"linear_fc{i}.weight_quantizer._amax"].shape for i in (1, 2)] == [(), ()]
    assert_same_tensors(amaxes_from_modelopt(theirs), state, what=form)
    theirs["linear_fc1.weight_quantizer._amax"] = torch.full((1,), 3.0)  # as it lies in files
    assert_same_tensors(amaxes_from_modelopt(theirs), state, what=form)


def test_equal_amaxes_are_the_scalar_of_one_quantizer_over_all_experts():
    """As ``calibrate(axis="rank")`` finds them; where they differ, no scalar is right."""
    state = ours()
    for i in (1, 2):
        state[f"linear_fc{i}.calibrated_amax"] = torch.full((3, 1, 1), 3.0 * i)
    theirs = amaxes_to_modelopt(state, "scalar")
    amaxes = [theirs[f"linear_fc{i}.weight_quantizer._amax"] for i in (1, 2)]
    assert amaxes == [torch.tensor(3.0), torch.tensor(6.0)] and not amaxes[0].shape
    with pytest.raises(
        LayoutError, match="fc1.calibrated_amax: expected equal amaxes for linear_fc1"
    ):
        amaxes_to_modelopt(ours(), "scalar")


def inputs_of(prefix=""):
    return {
        f"{prefix}linear_fc{i}.calibrated_input_amax": torch.full((1, 1, 1), i + 2**-20)
        for i in (1, 2)
    }


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("with_weights", [True, False])
def test_the_amax_of_inputs_is_that_of_every_input_quantizer(form, with_weights):
    """Of one of a linear, or of one in each expert; the same bits both ways."""
    state = ours(LAYERS[0], weights=with_weights) | inputs_of(LAYERS[0])
    theirs = amaxes_to_modelopt(state, form)
    for i in (1, 2):
        experts = [f"local_experts.{e}." for e in range(3)] if form == "sequential" else [""]
        found = {key: value for key, value in theirs.items() if f"fc{i}.input_quantizer" in key}
        assert list(found) == [f"{LAYERS[0]}{e}linear_fc{i}.input_quantizer._amax" for e in experts]
        for value in found.values():
            assert_bytes_equal(value, torch.tensor(i + 2**-20), what=form)
    back = amaxes_from_modelopt(theirs)
    assert list(back) == list(state)
    assert_same_tensors(back, state, what=form)


def test_inputs_of_experts_have_the_largest_of_their_amaxes():
    """Each expert of a ``SequentialMLP`` has its own; any shape and dtype of one value will do. Of
    weights without amaxes, they are converted alone."""
    weights = {key: value for key, value in ours().items() if key.endswith("weight")}
    theirs = {
        **weights,
        "local_experts.1.linear_fc1.input_quantizer._amax": torch.tensor([2.0]),
        "local_experts.0.linear_fc1.input_quantizer._amax": torch.tensor(4.5).bfloat16(),
        "linear_fc2.input_quantizer._amax": torch.ones(1, 1),
    }
    want = {"linear_fc1.calibrated_input_amax": 4.5, "linear_fc2.calibrated_input_amax": 1.0}
    back = amaxes_from_modelopt(theirs)
    assert back.keys() == weights.keys() | want.keys()
    for key, value in want.items():
        assert_bytes_equal(back[key], torch.full((1, 1, 1), value), what=key)


def test_amaxes_of_inputs_under_both_keys_or_of_unknown_experts_are_refused():
    doubled = inputs_of() | {"linear_fc2.input_quantizer._amax": torch.ones(())}
    for convert in (amaxes_to_modelopt, amaxes_from_modelopt):
        with pytest.raises(
            LayoutError, match="fc2.calibrated_input_amax: expected one amax, got also"
        ):
            convert(doubled)
    with pytest.raises(LayoutError, match="expected weights or amaxes of each expert beside it"):
        amaxes_to_modelopt(inputs_of(), "sequential")


# What is refused, with every fault by its key

_AMAX, _THEIRS = "linear_fc1.calibrated_amax", "linear_fc1.weight_quantizer"
BAD_OURS = {
    "none": (
        {_AMAX: None, "linear_fc2.calibrated_amax": None},
        ["linear_fc1.calibrated_amax: missing", "linear_fc2.calibrated_amax: missing"],
    ),
    "another number": (
        {_AMAX: torch.ones(4, 1, 1)},
        ["expected [3, 1, 1], flat, or one, got [4, 1, 1]"],
    ),
    "NaN": ({_AMAX: torch.full((3, 1, 1), torch.nan)}, ["expected finite magnitudes, got [nan"]),
    "a sign": ({_AMAX: torch.full((3,), -1.0)}, ["expected finite magnitudes, got [-1.0"]),
    "theirs beside": (
        {f"{_THEIRS}._amax": torch.ones(3)},
        [f"{_THEIRS}._amax: expected no amaxes"],
    ),
    "one of all": ({_AMAX: torch.ones(1, 1, 1)}, ["expected one value per expert for"]),
    "channels of inputs": (
        {"linear_fc1.calibrated_input_amax": torch.ones(4)},
        ["linear_fc1.calibrated_input_amax: expected one value, got [4]"],
    ),
}
BAD_THEIRS = {
    "a gap": ({f"{_THEIRS}.1._amax": None}, [f"{_THEIRS}.1._amax: missing, expected of 3 experts"]),
    "one too many": ({f"{_THEIRS}.3._amax": torch.ones(())}, ["expected experts 0 to 2 only"]),
    "none": (
        {
            f"linear_fc{i}.weight_quantizer.{index}._amax": None
            for i in (1, 2)
            for index in range(3)
        },
        ["linear_fc1.weight_quantizer._amax: missing", "linear_fc2.weight_quantizer._amax: missi"],
    ),
    "two forms": (
        {f"{_THEIRS}._amax": torch.ones(3)},
        [f"{_THEIRS}._amax: expected amaxes in one form", f"{_THEIRS}.0._amax: expected amaxes"],
    ),
    "channels": ({f"{_THEIRS}.0._amax": torch.ones(6, 1)}, ["expected one value, got [6, 1]"]),
    "another name": ({f"{_THEIRS}s.0._amax": torch.ones(())}, ["expected an amax of ModelOpt's"]),
    "NaN": ({f"{_THEIRS}.0._amax": torch.tensor(torch.nan)}, ["expected finite magnitudes"]),
    "ours beside": ({_AMAX: torch.ones(3, 1, 1)}, [f"{_AMAX}: expected no amaxes but ModelOpt's"]),
}


def changed(state, changes):
    state = {**state, **changes}
    return {key: value for key, value in state.items() if value is not None}


REFUSED = {
    **{f"ours: {name}": (amaxes_to_modelopt, ours(), *case) for name, case in BAD_OURS.items()},
    **{
        f"theirs: {name}": (amaxes_from_modelopt, amaxes_to_modelopt(ours()), *case)
        for name, case in BAD_THEIRS.items()
    },
}


@pytest.mark.parametrize(("convert", "state", "changes", "says"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_complete_or_fits_no_form_is_refused_with_every_fault(
    convert, state, changes, says
):
    state = changed(state, changes)
    before = dict(state)
    with pytest.raises(LayoutError, match="Nothing was converted") as caught:
        convert(state)
    assert all(one in str(caught.value) for one in says), caught.value
    assert all(state[key] is value for key, value in before.items())


# What has no meaning here, or is not quantized, stays what it is and is named


@pytest.mark.parametrize("form", FORMS)
def test_other_states_of_quantizers_stay_and_are_named(form):
    """A global amax of two-level scales, what ``get_extra_state`` returns, scales of SmoothQuant:
    the same objects under their keys, both ways, and no expert's amax is another for them."""
    state = ours(LAYERS[0])
    theirs = amaxes_to_modelopt(state, form)
    others = {}
    for i in (1, 2):
        (first, *_) = keys_of(form, f"linear_fc{i}", 3)
        quantizer = LAYERS[0] + first.removesuffix("._amax")
        others[f"{quantizer}._global_amax"] = torch.tensor(3.0)
        others[f"{quantizer}._extra_state"] = b"modelopt"
        others[f"{quantizer}._pre_quant_scale"] = torch.ones(4)
    others[f"{LAYERS[0]}linear_fc1._extra_state"] = b"of the linear"
    others[f"{LAYERS[0]}linear_fc1.input_quantizer._extra_state"] = b"of activations"
    with pytest.warns(UserWarning, match="6 other states of quantizers stay") as caught:
        back = amaxes_from_modelopt(theirs | others)
    assert_same_tensors({key: back[key] for key in state}, state, what=form)
    assert back.keys() == state.keys() | others.keys()
    assert all(back[key] is value for key, value in others.items())
    named = str(caught[0].message)
    assert all((key in named) == (".weight_quantizer" in key) for key in others)
    with pytest.warns(UserWarning, match="6 other states of quantizers stay"):
        again = amaxes_to_modelopt(back, form)
    assert again.keys() == (theirs | others).keys()
    assert all(again[key] is value for key, value in others.items())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("without", ["a layer", "a linear"])
def test_a_model_quantized_in_part_keeps_that_part_and_the_rest_is_named(form, without):
    """As ModelOpt has them where quantizers of some layers are disabled: both ways."""
    state = ours(LAYERS[0]) | ours(LAYERS[1])
    gone = {
        "a layer": [f"{LAYERS[1]}linear_fc{i}.calibrated_amax" for i in (1, 2)],
        "a linear": [f"{LAYERS[1]}linear_fc2.calibrated_amax"],
    }[without]
    for key in gone:
        del state[key]
    linears = ", ".join(key.removesuffix(".calibrated_amax") for key in gone)
    with pytest.warns(UserWarning, match=f"no amaxes of {linears}"):
        theirs = amaxes_to_modelopt(state, form)
    assert not any("calibrated" in key for key in theirs)
    with pytest.warns(UserWarning, match=f"no amaxes of {linears}"):
        back = amaxes_from_modelopt(theirs)
    assert list(back) == list(state)
    assert_same_tensors(back, state, what=form)


@pytest.mark.parametrize("form", FORMS)
def test_amaxes_are_those_of_their_experts_in_whatever_order_keys_stand(form):
    """Files list keys by the alphabet, 0, 1, 10, 2, and there may be more than ten experts."""
    state = ours(LAYERS[0], 11)
    theirs = dict(sorted(amaxes_to_modelopt(state, form).items()))
    assert_same_tensors(amaxes_from_modelopt(theirs), state, what=form)
