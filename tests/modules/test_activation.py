"""Gated linear units are their formula."""

import pytest
import torch
import torch.nn.functional as F

from moe_optim.modules.activation import glu
from tests.support.bytes import assert_bytes_equal


def make_hidden(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16() * 3


def test_the_gate_is_the_first_half():
    hidden = make_hidden(5, 12)
    assert_bytes_equal(glu(hidden, F.silu), F.silu(hidden[:, :6]) * hidden[:, 6:])


def test_the_offset_is_added_to_the_linear_half():
    hidden = make_hidden(5, 12)
    expected = F.silu(hidden[:, :6]) * (hidden[:, 6:] + 0.5)
    assert_bytes_equal(glu(hidden, F.silu, linear_offset=0.5), expected)


def test_the_gate_is_clamped_from_above_and_the_linear_half_from_both_sides():
    hidden = torch.tensor([[-9.0, 9.0, -9.0, 9.0]])
    clamped = glu(hidden, torch.nn.Identity(), clamp_value=2.0)
    assert_bytes_equal(clamped, torch.tensor([[-9.0 * -2.0, 2.0 * 2.0]]))


@pytest.mark.parametrize("clamp_value", [None, 1.0])
def test_no_tokens_give_no_tokens(clamp_value):
    assert glu(make_hidden(0, 12), F.silu, clamp_value=clamp_value).shape == (0, 6)
