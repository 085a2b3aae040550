"""Dequantizing: exact where it says so, and the fast path equal to the definition."""

import math

import pytest
import torch

from moe_optim.errors import LayoutError
from moe_optim.formats import (
    DIRECTIONS,
    FORMATS,
    FP8_BLOCK,
    MXFP8,
    MXFP8_2D,
    NVFP4,
    QuantizedWeight,
)
from moe_optim.formats.reference import dequantize, dequantize_bf16, quantize
from tests.formats.reference import scalar_oracle
from tests.support.bytes import assert_bytes_equal, assert_values_equal
from tests.support.inputs import wide_range_weights

every_format = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS.keys())
every_direction = pytest.mark.parametrize("direction", DIRECTIONS)

ALL_BYTES = torch.arange(256, dtype=torch.int32).to(torch.uint8)


def fast(q, direction="rowwise", **kwargs):
    data, scale = q.data(direction), q.scale(direction)
    return dequantize_bf16(data, scale, q.format, direction, global_amax=q.global_amax, **kwargs)


@every_direction
def test_e8m0_formats_every_byte_at_every_scale(direction):
    """256 data bytes x 256 scale bytes, NaN scales and underflow to subnormals included."""
    q = QuantizedWeight.empty(MXFP8, (256, 32, 256))
    q.rowwise_data.copy_(ALL_BYTES)
    q.columnwise_data.copy_(ALL_BYTES)
    q.rowwise_scale.copy_(ALL_BYTES.view(-1, 1, 1))
    q.columnwise_scale.copy_(ALL_BYTES.view(-1, 1, 1))
    values = dequantize(q, direction)
    assert_values_equal(fast(q, direction), values.bfloat16())
    exact = [scalar_oracle.e4m3_value(code) for code in range(0x7F)]
    for scale in (0x00, 0x01, 0x7F, 0xF7):
        want = torch.tensor(exact, dtype=torch.float64) * 2.0 ** (scale - 127)
        got = values[scale, 0, :0x7F].double()
        assert torch.equal(got[want < 2.0**128], want[want < 2.0**128])


@every_direction
def test_fp8_block_every_byte_at_every_scale_that_bf16_holds(direction):
    """Quantizing gives 2^-127 to 2^120; all powers of two in bf16 are tried, in partial blocks."""
    scales = torch.arange(-133, 128, dtype=torch.float64).exp2().float()
    q = QuantizedWeight.empty(FP8_BLOCK, (len(scales), 2, 256))
    q.rowwise_data.copy_(ALL_BYTES)
    q.columnwise_data.copy_(ALL_BYTES.unsqueeze(1))
    q.rowwise_scale.copy_(scales.view(-1, 1, 1))
    q.columnwise_scale.copy_(scales.view(-1, 1, 1))
    values = dequantize(q, direction)
    assert values.shape == (len(scales), 2, 256)
    assert_values_equal(fast(q, direction), values.bfloat16())


@every_direction
@pytest.mark.parametrize("amax", [0.0, 2.0**-133, 1e-3, 0.37, 6.0, 3e38])
def test_nvfp4_every_byte_at_every_scale(direction, amax):
    """256 packed bytes x 128 scale codes for several experts; sign bits of scales never occur."""
    q = QuantizedWeight.empty(NVFP4, (128, 32, 512))
    q.rowwise_data.copy_(ALL_BYTES)
    q.columnwise_data.copy_(ALL_BYTES.view(-1, 1).repeat(2, 16))
    q.rowwise_scale.copy_(ALL_BYTES[:128].view(-1, 1, 1))
    q.columnwise_scale.copy_(ALL_BYTES[:128].view(-1, 1, 1))
    q.global_amax.fill_(amax)
    assert_values_equal(fast(q, direction), dequantize(q, direction).bfloat16())


@every_direction
@pytest.mark.parametrize("exponent", [-100, -116, -117, -118, -126])
def test_nvfp4_of_tiny_experts_is_decoded_by_the_scale_that_encoded_it(direction, exponent):
    """element * block scale / S_enc in fp64, with S_enc = min(2688 / G, FLT_MAX).

    Below an amax G of 2688 / FLT_MAX, 1.3 * 2^-117, the encode scale is FLT_MAX for all.
    """
    amax = 2.0**exponent
    master = wide_range_weights(1, 32, 64, exponents=(-6, 0)).clamp(-1, 1) * amax
    master[0, 0, 0] = amax
    q = quantize(master, NVFP4)
    data, scale = q.data(direction)[0], q.scale(direction)[0]
    elements = [[byte & 15, byte >> 4] for row in data.tolist() for byte in row]
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    decoded = torch.cat((magnitudes, -magnitudes))[torch.tensor(elements)].view(len(data), -1)
    scales = scale.view(torch.float8_e4m3fn).double()
    encode = min(2688 / amax, scalar_oracle.FLT_MAX)
    want = decoded * scales.repeat_interleave(16, 0).repeat_interleave(16, 1) / encode
    want = want if direction == "rowwise" else want.T
    error = (dequantize(q, direction)[0].double() - want).abs()
    # each of two fp32 products of scales rounds, to a subnormal below 2^-126, and elements reach 6
    assert (error <= want.abs() * 2.0**-21 + 7 * 2.0**-150).all()
    assert bool(want.count_nonzero())


@every_format
@every_direction
def test_out_is_written_and_returned(format, direction):
    q = quantize(wide_range_weights(2, 32, 128), format)
    out = torch.full((2, 32, 128), math.nan, dtype=torch.bfloat16)
    assert fast(q, direction, out=out) is out
    assert_bytes_equal(out, fast(q, direction))


@pytest.mark.parametrize("format", [MXFP8, MXFP8_2D, FP8_BLOCK], ids=lambda f: f.name)
def test_the_largest_weights_round_up_to_infinity(format):
    """248 * 2^120 is a tie of 240 and 256, and 256 * 2^120 is 2^128; one bf16 below is finite."""
    infinite = torch.full((1, 32, 32), 248 * 2.0**120)
    finite = torch.full((1, 32, 32), 247 * 2.0**120)
    assert dequantize(quantize(infinite, format)).isinf().all()
    assert (dequantize(quantize(finite, format)) == 240 * 2.0**120).all()


def test_a_missing_amax_and_a_wrong_out_are_refused():
    q = quantize(wide_range_weights(2, 32, 64), NVFP4)
    with pytest.raises(LayoutError, match=r"nvfp4 needs global_amax \[2\], got None"):
        dequantize_bf16(q.rowwise_data, q.rowwise_scale, NVFP4)
    with pytest.raises(
        LayoutError, match=r"dequantize_bf16.out: expected contiguous \[2, 32, 64\]"
    ):
        fast(q, out=torch.empty(2, 64, 32, dtype=torch.bfloat16))


@every_format
def test_quantizing_what_was_dequantized_changes_codes_by_powers_of_two_and_no_value(format):
    """As frozen weights do across a checkpoint. A block whose largest element was rounded down to
    half the range gets half the scale and codes twice as large. Not one byte changes with scales of
    fp32 or bf16, nor in NVFP4, as long as scales are no subnormals: those of blocks below 2^-15 of
    the expert's amax."""
    exponents = (-3, 3) if format.has_global_amax else (-40, 40)
    weights = wide_range_weights(4, 256, 256, exponents=exponents)
    saved = dequantize(quantize(weights, format))
    loaded = quantize(saved.bfloat16().float(), format)
    assert_bytes_equal(dequantize(loaded), saved)
    scales = quantize(weights, format).scale("rowwise").view(torch.uint8)
    changed = int((scales != loaded.scale("rowwise").view(torch.uint8)).sum())
    keeps = format.scale_encoding in ("e4m3", "fp32", "bf16")
    assert (changed == 0) == keeps, "else the statement about bytes says nothing"
    if format is not MXFP8:  # one set of values in both directions
        assert_bytes_equal(dequantize(loaded, "columnwise"), saved)


@every_format
def test_both_directions_have_the_same_values_where_the_format_says_so(format):
    """Of experts whose magnitudes span many scales; edge blocks may be partial."""
    q = quantize(wide_range_weights(2, 192, 384), format)
    agree = torch.equal(fast(q, "rowwise"), fast(q, "columnwise"))
    assert agree == format.directions_agree
