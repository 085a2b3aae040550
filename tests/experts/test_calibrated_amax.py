"""Amaxes of a calibration move, copy, save and load with the weights they were found of."""

import copy
from itertools import product

import pytest
import torch

from moe_optim.calibration.calibrated_amax import calibrated_amax, hold_calibrated_amax
from moe_optim.errors import LayoutError, StateError
from moe_optim.experts.grouped_linear import GroupedLinear
from moe_optim.formats import MXFP8
from tests.support.bytes import assert_bytes_equal

AMAX = torch.tensor([1 + 2**-20, 2.0, 3.0]).view(3, 1, 1)
"""The first one is no number of bf16."""

kinds = pytest.mark.parametrize(
    ("format", "layout"),
    [(None, "grouped"), (None, "indexed"), (MXFP8, "grouped"), (MXFP8, "indexed")],
    ids=["bf16 grouped", "bf16 indexed", "mxfp8 grouped", "mxfp8 indexed"],
)


def make(format, layout, amax=AMAX):
    linear = GroupedLinear(3, 64, 32, format=format, expert_layout=layout, name="fc1")
    linear.load_values(torch.zeros(3, 64, 32, dtype=torch.bfloat16))
    if amax is not None:
        hold_calibrated_amax(linear, amax.clone())
    return linear


@kinds
def test_copies_and_casts_keep_every_bit(format, layout):
    """Also where a wrapper makes a model bf16, as Megatron's does."""
    linear = make(format, layout)
    for copied in (copy.deepcopy(linear), make(format, layout).to(torch.bfloat16)):
        assert_bytes_equal(calibrated_amax(copied), AMAX, what=layout)
        assert calibrated_amax(copied) is not calibrated_amax(linear)
    assert calibrated_amax(copy.deepcopy(linear).to("meta")).device.type == "meta"


def test_a_cast_that_is_refused_leaves_them():
    linear = make(MXFP8, "grouped")
    with pytest.raises(StateError, match="weights cannot become torch.float32"):
        linear.float()
    assert_bytes_equal(calibrated_amax(linear), AMAX)


@kinds
@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_brings_them_into_the_shape_of_the_buffer(format, layout, assign):
    """Whatever was there before; from bf16, too."""
    state = make(format, layout).state_dict()
    for shape, live in product([(3, 1, 1), (3, 1), (3,)], [None, 7 * AMAX, torch.ones(1, 1, 1)]):
        linear = make(format, layout, live)
        state["calibrated_amax"] = AMAX.reshape(shape).double()
        linear.load_state_dict(state, strict=True, assign=assign)
        assert_bytes_equal(calibrated_amax(linear), AMAX, what=str(shape))
        for one in (torch.tensor(5.0), torch.full((1,), 5.0), torch.full((1, 1, 1), 5.0)):
            linear.load_state_dict({**state, "calibrated_amax": one}, strict=True, assign=assign)
            assert_bytes_equal(calibrated_amax(linear), torch.full((1, 1, 1), 5.0), what="one")


@kinds
def test_weights_that_come_without_leave_none_behind(format, layout):
    """What does not bring weights changes nothing."""
    linear = make(format, layout)
    linear.load_state_dict({}, strict=False)
    assert_bytes_equal(calibrated_amax(linear), AMAX, what="kept")
    weights = make(format, layout, None).state_dict()
    assert not [key for key in weights if "amax" in key]
    linear.load_state_dict({**weights, "calibrated_amax": None}, strict=True)
    assert calibrated_amax(linear) is None
    hold_calibrated_amax(linear, AMAX)
    linear.load_state_dict(weights, strict=True)
    assert calibrated_amax(linear) is None


BAD = {
    "too few": (torch.ones(2), r"expected one value for each of 3 experts, .* got \[2\]"),
    "none at all": (torch.ones(0), r"expected one value for each of 3 experts, .* got \[0\]"),
    "a weight": (torch.ones(3, 64, 32), "expected one value for each of 3 experts"),
    "no tensor": ([1.0, 1.0, 1.0], "expected one value .* got list"),
    "NaN": (torch.tensor([1.0, torch.nan, 1.0]), r"expected finite magnitudes, got \[1.0, nan"),
    "Inf": (torch.tensor([1.0, torch.inf, 1.0]), "expected finite magnitudes"),
    "a sign": (torch.tensor([1.0, -1.0, 1.0]), "expected finite magnitudes"),
}


@pytest.mark.parametrize(("amax", "says"), BAD.values(), ids=BAD.keys())
def test_what_is_no_amax_is_refused_before_anything_is_loaded(amax, says):
    linear = make(None, "grouped")
    state = {"weight": torch.ones(3, 64, 32), "calibrated_amax": amax}
    with pytest.raises(LayoutError, match=f"fc1.calibrated_amax: {says}"):
        linear.load_state_dict(state)
    assert not linear.weight.any()
    assert_bytes_equal(calibrated_amax(linear), AMAX, what="kept")
