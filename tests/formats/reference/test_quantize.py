"""What holds for quantized weights of every format, and the scales that special blocks get."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_optim.errors import LayoutError
from moe_optim.formats import (
    FORMATS,
    FP8_BLOCK,
    FP8_BLOCK_FP32,
    MXFP8,
    MXFP8_2D,
    NVFP4,
    QuantizedWeight,
    round_up,
)
from moe_optim.formats.reference import (
    codes,
    dequantize,
    dequantize_bf16,
    dequantizing,
    quantize,
    quantize_into,
)
from moe_optim.formats.reference.scales import encode_scale, encode_scales
from tests.support.bytes import assert_bytes_equal
from tests.support.inputs import (
    SENTINEL,
    normal_weights,
    poisoned,
    wide_range_weights,
    with_specials,
)

E4M3_FORMATS = [MXFP8, MXFP8_2D, FP8_BLOCK]
every_format = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS.keys())
every_e4m3_format = pytest.mark.parametrize("format", E4M3_FORMATS, ids=lambda f: f.name)
few_examples = settings(max_examples=10)


@st.composite
def weights(draw, max_experts=4, exponents=(-40, 40)):
    """Wide-range [E, R, C] weights whose sizes are multiples of 32."""
    experts = draw(st.integers(1, max_experts))
    rows, cols = 32 * draw(st.integers(1, 5)), 32 * draw(st.integers(1, 5))
    seed = draw(st.integers(0, 2**31))
    return wide_range_weights(experts, rows, cols, seed=seed, exponents=exponents)


def test_nvfp4_block_scales_are_relative_to_the_expert():
    """Blocks of 6, 3 and 2^-20 next to each other, and one of zeros: amax 6 gives 448, the top."""
    weight = torch.zeros(1, 16, 64)
    weight[0, :, :16], weight[0, :, 16:32], weight[0, 5, 32] = 6.0, -3.0, 2.0**-20
    weight[0, :, 48:] = -0.0
    q = quantize(weight, NVFP4)
    assert q.global_amax.tolist() == [6.0]
    assert q.rowwise_scale.tolist() == [[[0x7E, 0x76, 0x00, 0x00]]]  # 448, 224, too small, zero
    # Full blocks hold +-6. A block whose scale is zero saturates, and reads back as zero.
    assert q.rowwise_data[0, 5, [0, 8, 16, 24]].tolist() == [0x77, 0xFF, 0x07, 0x88]
    assert dequantize(q)[0, 5, 32].item() == 0.0


def test_nvfp4_block_scale_multiplies_in_the_order_of_transformer_engine():
    """195/512 * 448 / (65/64) is 168, midway between the E4M3 neighbours 160 and 176.

    A * (S_enc * fl(1/6)) comes out just above it. (A / 6) * S_enc gives 168 and rounds to 160.
    """
    weight = torch.zeros(1, 16, 32)
    weight[0, 0, 0], weight[0, 0, 16] = 65 / 64, 195 / 512
    assert quantize(weight, NVFP4).rowwise_scale.tolist() == [[[0x7E, 0x73]]]


def every_finite_amax_bits():
    return torch.arange(0x7F80, dtype=torch.int16)


def test_mxfp8_scale_is_the_smallest_power_of_two_that_keeps_an_amax_within_448():
    """For every finite bf16."""
    amax = every_finite_amax_bits().view(torch.bfloat16).double()
    code = encode_scales(MXFP8, amax.float(), None)[0].double()
    assert (amax <= 448 * (code - 127).exp2()).all()
    smaller_would_overflow = amax > 448 * (code - 128).exp2()
    assert (smaller_would_overflow | (code == 0)).all()


def test_fp8_block_scale_is_the_largest_power_of_two_that_keeps_an_amax_within_448():
    """For every finite bf16, and no scale leaves the range whose inverse fp32 holds exactly."""
    amax = every_finite_amax_bits().view(torch.bfloat16)[1:].double()
    scale = encode_scale(amax.float(), FP8_BLOCK).double()
    assert (amax * scale <= 448).all()
    assert ((amax * scale * 2 > 448) | (scale == 2.0**127)).all()
    assert scale.min() == 2.0**-120
    assert torch.equal(scale.float().reciprocal().double(), scale.reciprocal())


def test_fp8_block_scales_of_fp32_are_448_over_the_amax_rounded_to_nearest():
    """For every finite bf16: at most the largest bf16, where the quotient overflows.

    A quotient of bf16 values rounded to fp64 rounds to fp32 as the exact one does.
    """
    amax = every_finite_amax_bits().view(torch.bfloat16)[1:].double()
    want = (448 / amax).clamp(max=torch.finfo(torch.bfloat16).max).float()
    assert_bytes_equal(encode_scale(amax.float(), FP8_BLOCK_FP32), want)


def test_fp8_blocks_with_powers_of_two_take_the_exponents_of_those_with_fp32_scales():
    amax = every_finite_amax_bits().view(torch.bfloat16).float()
    mantissa, exponent = torch.frexp(encode_scale(amax, FP8_BLOCK_FP32))
    want = torch.ldexp(torch.ones_like(amax), exponent - 1).where(amax > 0, 1.0)
    assert_bytes_equal(encode_scale(amax, FP8_BLOCK), want)


@settings(max_examples=20)
@given(weights())
def test_columnwise_buffers_are_the_rowwise_buffers_of_the_transpose(master):
    for format in (MXFP8, NVFP4, FP8_BLOCK):
        q, transposed = quantize(master, format), quantize(master.transpose(1, 2), format)
        data, scale = transposed.rowwise_data, transposed.rowwise_scale
        if format is MXFP8:
            data, scale = data.transpose(1, 2), scale.transpose(1, 2)
        assert_bytes_equal(q.columnwise_data, data)
        assert_bytes_equal(q.columnwise_scale, scale)


@every_e4m3_format
@given(master=weights(exponents=(-60, 60)), exponent=st.integers(-30, 30))
@few_examples
def test_a_power_of_two_moves_scales_and_no_data(format, master, exponent):
    """All scales are powers of two, away from both ends of the range they just absorb it."""
    master = master.bfloat16().where(master.abs() > 2.0**-85, 0).float()
    q, moved = quantize(master, format), quantize(master * 2.0**exponent, format)
    assert_bytes_equal(moved.rowwise_data, q.rowwise_data)
    assert_bytes_equal(moved.columnwise_data, q.columnwise_data)
    assert_bytes_equal(dequantize(moved), dequantize(q) * 2.0**exponent)


@every_format
def test_master_is_rounded_to_bf16_first(format):
    """The fp32 just above 1.75 is 1.75 in bf16: without that rounding MXFP8 scales would double."""
    master = torch.full((1, 32, 128), 1.75 * (1 + 2.0**-20))
    assert_buffers_equal(quantize(master, format), quantize(torch.full_like(master, 1.75), format))
    assert_buffers_equal(quantize(master, format), quantize(master.bfloat16(), format))


@every_format
def test_a_nan_is_stored_and_leaves_the_scales_alone(format):
    """An amax ignores NaN. E4M3 keeps the NaN as 0x7F; E2M1 gives +6, 0x7, and INT4 7, 0xF."""
    master = normal_weights(2, 32, 128)
    master[1, 3, 6] = 0.0
    spoiled = master.clone()
    spoiled[1, 3, 6] = -math.nan
    q, want = quantize(spoiled, format), quantize(master, format)
    assert_bytes_equal(q.rowwise_scale, want.rowwise_scale)
    assert_bytes_equal(q.columnwise_scale, want.columnwise_scale)
    column = 6 // format.elements_per_byte
    got = q.rowwise_data[1, 3, column].item()
    code = {"e4m3": 0x7F, "e2m1": 0x7, "int4": 0xF}[format.element]
    assert got & (0x7F if format.element == "e4m3" else 0xF) == code
    differs = (q.rowwise_data != want.rowwise_data).nonzero().tolist()
    assert differs == [[1, 3, column]]


@every_format
def test_weights_larger_than_a_slab_equal_their_experts(format):
    """Work is cut into chunks of a cache's size, here across experts; it makes no difference."""
    master = with_specials(wide_range_weights(3, 160, 1408))
    stacked = quantize(master, format)
    for expert in range(len(master)):
        alone = quantize(master[expert : expert + 1], format)
        for field, buffer in stacked.buffers().items():
            assert_bytes_equal(buffer[expert : expert + 1], alone.buffers()[field], what=field)


@every_format
def test_quantize_into_overwrites_every_byte_and_returns_what_quantize_does(format):
    master = wide_range_weights(2, 64, round_up(96, format.dimension_multiple))
    out = poisoned(format, master.shape)
    pointers = {field: buffer.data_ptr() for field, buffer in out.buffers().items()}
    quantize_into(master, format, out)
    assert_buffers_equal(out, quantize(master, format))
    assert pointers == {field: buffer.data_ptr() for field, buffer in out.buffers().items()}


@every_format
def test_quantize_into_writes_views_and_nothing_around_them(format):
    """Buffers inside larger allocations, as padded storage has them: no buffer is contiguous."""
    master = wide_range_weights(2, 64, round_up(96, format.dimension_multiple))
    want = quantize(master, format)
    frames = {
        field: torch.full(
            [size + 3 for size in buffer.shape] + [buffer.element_size()],
            SENTINEL,
            dtype=torch.uint8,
        ).view(buffer.dtype)[..., 0]
        for field, buffer in want.buffers().items()
    }
    views = {
        field: frame[tuple(slice(1, size - 2) for size in frame.shape)]
        for field, frame in frames.items()
    }
    out = QuantizedWeight.of_buffers(format, want.shape, views.values())
    quantize_into(master, format, out)
    assert_buffers_equal(out, want)
    for field, frame in frames.items():
        around = frame.clone()
        around[tuple(slice(1, size - 2) for size in frame.shape)] = 0
        sentinels = (around.view(torch.uint8) == SENTINEL).sum().item()
        expected = (frame.numel() - views[field].numel()) * frame.element_size()
        assert sentinels == expected, field


@every_format
@pytest.mark.parametrize("shape", [(0, 32, 128), (2, 0, 128), (2, 32, 0)], ids=str)
def test_a_weight_without_elements_is_quantized_to_nothing(format, shape):
    q = quantize(torch.empty(shape), format)
    assert q.shape == shape
    assert dequantize(q).shape == shape
    assert q.global_amax is None or (q.global_amax == 0).all()


def test_a_default_device_does_not_reach_the_tables():
    """Models are often built under ``torch.device("meta")``; tables are kept for good."""
    master = normal_weights(1, 32, 64)
    for table in (codes._powers, codes._reciprocals, dequantizing._decode_table):
        table.cache_clear()
    with torch.device("meta"):
        q = quantize(master, MXFP8)
        dequantize_bf16(q.rowwise_data, q.rowwise_scale, MXFP8)
    assert_bytes_equal(
        dequantize_bf16(q.rowwise_data, q.rowwise_scale, MXFP8), dequantize(q).bfloat16()
    )


@every_format
def test_the_master_is_left_alone_and_may_be_strided(format):
    master = wide_range_weights(2, 128, 64).transpose(1, 2)
    before = master.clone()
    assert_buffers_equal(quantize(master, format), quantize(master.contiguous(), format))
    assert_bytes_equal(master, before)


REFUSED = {
    "rows no multiple": (torch.zeros(1, 48, 64), MXFP8, r"fc1: mxfp8 needs rows .* by 32, got"),
    "cols no multiple": (torch.zeros(1, 64, 48), MXFP8_2D, r"fc1: mxfp8_2d .* got \[64, 48\]"),
    "nvfp4 rows": (torch.zeros(1, 8, 16), NVFP4, r"fc1: nvfp4 needs rows .* by 16"),
    "one matrix": (torch.zeros(32, 32), MXFP8, r"fc1: expected a shape \[experts, rows, cols\]"),
    "half": (torch.zeros(1, 32, 32, dtype=torch.half), MXFP8, r"fc1: .* fp32 or bf16, got .*16"),
}


@pytest.mark.parametrize(("master", "format", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_a_master_that_does_not_fit_is_refused_by_name(master, format, message):
    with pytest.raises(LayoutError, match=message):
        quantize(master, format, name="fc1")


def test_storage_of_another_format_or_shape_is_refused():
    master = torch.zeros(1, 32, 64)
    with pytest.raises(LayoutError, match=r"weight: expected storage for mxfp8 .* got mxfp8_2d"):
        quantize_into(master, MXFP8, QuantizedWeight.empty(MXFP8_2D, (1, 32, 64)))
    with pytest.raises(LayoutError, match=r"\[1, 32, 64\], got mxfp8 \[1, 64, 32\]"):
        quantize_into(master, MXFP8, QuantizedWeight.empty(MXFP8, (1, 64, 32)))


def assert_buffers_equal(got, want):
    assert got.buffers().keys() == want.buffers().keys()
    for field, buffer in got.buffers().items():
        assert_bytes_equal(buffer, want.buffers()[field], what=field)
