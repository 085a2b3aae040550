"""What quantizing to a row-only format commutes with: itself, signs, order, powers of two."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_optim.formats import INT4, INT4_G128, MXFP4, MXFP8_ROWS, NVFP4_ROWS
from moe_optim.formats.reference import dequantize, dequantize_bf16, quantize
from moe_optim.formats.reference.codes import decode, decode_int4
from tests.support.bytes import assert_bytes_equal
from tests.support.number_formats.bit_weights import amax_sweep, bf16

ROWS = (MXFP8_ROWS, MXFP4, NVFP4_ROWS, INT4, INT4_G128)
POWERS = (MXFP8_ROWS, MXFP4)
few = settings(max_examples=8)
named = {"ids": lambda format: format.name}
LOWEST, HIGHEST = 40 << 7, 200 << 7
"""Bits of amaxes far from overflow and from the smallest scales."""


@st.composite
def blocks(draw):
    """Make [1, 1, 128] bf16 with signs, up to 12 binades smaller than one common magnitude."""
    top = draw(st.integers(LOWEST, HIGHEST))
    below = st.lists(st.integers(-(12 << 7), 12 << 7), min_size=128, max_size=128)
    offsets = torch.tensor(draw(below))
    magnitude = bf16(top - offsets.abs())
    return torch.where(offsets < 0, -magnitude, magnitude).view(1, 1, 128)


def values(q):
    return dequantize_bf16(q.rowwise_data, q.rowwise_scale, q.format, global_amax=q.global_amax)


@pytest.mark.parametrize("format", ROWS, **named)
@few
@given(weight=blocks())
def test_a_negated_weight_gives_negated_values(format, weight):
    one, other = quantize(weight, format), quantize(-weight, format)
    assert_bytes_equal(one.rowwise_scale, other.rowwise_scale)
    assert torch.equal(dequantize(one), -dequantize(other))


@pytest.mark.parametrize("format", ROWS, **named)
@few
@given(weight=blocks())
def test_a_larger_element_of_a_block_never_gives_a_smaller_code(format, weight):
    in_order = weight.view(1, -1, format.block_length).sort(-1).values.view(weight.shape)
    codes = decode(format.element, quantize(in_order, format).rowwise_data)
    assert (codes.view(-1, format.block_length).diff() >= 0).all()


@pytest.mark.parametrize("format", POWERS, **named)
@few
@given(weight=blocks(), power=st.integers(-30, 30))
def test_a_power_of_two_moves_into_the_scales(format, weight, power):
    one, other = quantize(weight, format), quantize(weight * 2.0**power, format)
    assert_bytes_equal(one.rowwise_data, other.rowwise_data)
    assert torch.equal(one.rowwise_scale.int() + power, other.rowwise_scale.int())


@pytest.mark.parametrize("format", (INT4, INT4_G128), **named)
@few
@given(weight=blocks(), power=st.integers(-30, 30))
def test_a_power_of_two_moves_into_the_scales_of_int4_unless_they_are_limited(
    format, weight, power
):
    one, other = quantize(weight, format), quantize(weight * 2.0**power, format)
    kept = torch.minimum(one.rowwise_scale, other.rowwise_scale) > 2.0**-16
    moved = one.rowwise_scale * 2.0**power
    assert_bytes_equal(moved[kept], other.rowwise_scale[kept])
    of_one, of_other = (q.rowwise_data.view(*kept.shape, -1)[kept] for q in (one, other))
    assert_bytes_equal(of_one, of_other)


@pytest.mark.parametrize("format", POWERS, **named)
def test_requantized_values_stay_the_same_where_scales_are_powers_of_two(format):
    """Every amax that does not overflow, with scales from 2^-124 up, where bf16 holds all values.

    Bytes stay the same, too, unless the largest element of a block is half the largest of the
    format, 224 or 3: the scale is then halved, and all elements are doubled.
    """
    weight = amax_sweep((1, 32))
    q = quantize(weight, format)
    kept = (q.rowwise_scale >= 3) & values(q).isfinite().all(2, keepdim=True)
    again = quantize(values(q), format)
    every = kept.expand_as(weight)
    assert_bytes_equal(values(again)[every], values(q)[every])

    codes = decode(format.element, q.rowwise_data)
    is_half = codes.abs().amax(2, keepdim=True) == format.data_max / 2
    assert is_half[kept].any() and not is_half[kept].all()
    assert torch.equal((q.rowwise_scale.int() - again.rowwise_scale)[kept], is_half[kept].int())
    doubled = torch.where(is_half, 2 * codes, codes)
    assert torch.equal(decode(format.element, again.rowwise_data)[every], doubled[every])


def test_requantized_int4_keeps_all_bytes():
    """Every amax up to 2^126."""
    weight = amax_sweep((1, 32))
    weight = weight[:, (weight.abs().amax(2) < 2.0**126)[0]]
    q = quantize(weight, INT4)
    again = quantize(values(q), INT4)
    assert_bytes_equal(again.rowwise_data, q.rowwise_data)
    assert_bytes_equal(again.rowwise_scale, q.rowwise_scale)


def test_an_int4_scale_of_others_moves_by_one_step_once():
    """Scales k / 128 for 128 <= k < 256, of blocks whose largest code is 7.

    7 k is a tie in bf16 if k is 4 more than a multiple of 8, and a seventh of the rounded value is
    then nearer to the neighbour of k. Only there, for k > 146, the scale moves: this package's
    amaxes, of bf16 precision, give no such scale.
    """
    k = torch.arange(128, 256)
    scale = (k / 128).bfloat16()
    codes = torch.arange(32) % 15 - 7
    weight = (codes * scale.float().view(1, -1, 1)).bfloat16()
    again = quantize(weight, INT4)
    assert_bytes_equal(decode_int4(again.rowwise_data), codes.float().expand(weight.shape))
    moved = again.rowwise_scale.flatten()
    steps = moved.view(torch.int16).int() - scale.view(torch.int16).int()
    is_tie = (k % 8 == 4) & (k > 146)
    assert is_tie.sum() == 14 and torch.equal(steps.abs(), is_tie.int())
    assert_bytes_equal(quantize(values(again), INT4).rowwise_scale, again.rowwise_scale)


def test_int4_uses_fifteen_codes_of_a_finite_weight():
    """Each block has a code of -7 or 7, unless its amax is 6.5 times the smallest scale or less."""
    weight = amax_sweep((1, 32))
    weight = weight[:, weight.isfinite().all(2)[0]]
    codes = decode_int4(quantize(weight, INT4).rowwise_data)
    largest = codes.abs().amax(2)
    assert torch.equal(largest == 7, weight.abs().amax(2).float() > 6.5e-5)
    assert largest.max() == 7
