"""Gated linear units are their formula."""

import pytest
import torch
import torch.nn.functional as F

from moe_optim.experts.activation import glu, remove_interleaving
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


@pytest.mark.parametrize("interleave_size", [None, 2])
def test_no_tokens_give_no_tokens(interleave_size):
    assert glu(make_hidden(0, 12), F.silu, interleave_size=interleave_size).shape == (0, 6)


def test_blocks_of_gate_and_linear_half_alternate():
    """Spelled out for F of 4 in blocks of 2, by the columns each one came from."""
    columns = torch.arange(8).view(1, 8)
    assert remove_interleaving(columns, 2).tolist() == [[0, 1, 4, 5, 2, 3, 6, 7]]


def interleave(halves, size):
    """Return the columns of [T, 2F] in turn, one after another."""
    features = halves.shape[1] // 2
    order = []
    for first in range(0, features, size):
        order += range(first, first + size)
        order += range(features + first, features + first + size)
    return halves[:, order]


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_halves_survive_a_round_trip(size):
    """Blocks as long as F are the halves themselves."""
    halves = make_hidden(5, 12)
    assert_bytes_equal(remove_interleaving(interleave(halves, size), size), halves)
    assert torch.equal(interleave(halves, size), halves) == (size == 6)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_an_interleaved_unit_is_the_unit_of_its_halves(size):
    """Values and gradients, clamped and with an offset."""
    halves = make_hidden(5, 12).requires_grad_()
    interleaved = interleave(halves.detach(), size).requires_grad_()
    options = {"linear_offset": 0.5, "clamp_value": 1.0}
    want, got = (
        glu(halves, F.silu, **options),
        glu(interleaved, F.silu, interleave_size=size, **options),
    )
    assert_bytes_equal(got, want)
    got.backward(want.detach())
    want.backward(want.detach())
    assert_bytes_equal(interleaved.grad, interleave(halves.grad, size))
