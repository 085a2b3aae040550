"""What holds for quantized weights of every format, and the scales that special blocks get."""

import pytest
import torch

from moe_optim.errors import LayoutError
from moe_optim.formats import (
    FORMATS,
    FP8_BLOCK,
    FP8_BLOCK_FP32,
    MXFP8,
    NVFP4,
    QuantizedWeight,
    round_up,
)
from moe_optim.formats.reference import (
    quantize,
    quantize_into,
)
from moe_optim.formats.reference.scales import encode_scale, encode_scales
from tests.support.bytes import assert_bytes_equal
from tests.support.inputs import (
    SENTINEL,
    wide_range_weights,
    with_specials,
)

every_format = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS.keys())


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
def test_the_master_is_left_alone_and_may_be_strided(format):
    master = wide_range_weights(2, 128, 64).transpose(1, 2)
    before = master.clone()
    assert_buffers_equal(quantize(master, format), quantize(master.contiguous(), format))
    assert_bytes_equal(master, before)


REFUSED = {
    "rows no multiple": (torch.zeros(1, 48, 64), MXFP8, r"fc1: mxfp8 needs rows .* by 32, got"),
    "one matrix": (torch.zeros(32, 32), MXFP8, r"fc1: expected a shape \[experts, rows, cols\]"),
    "half": (torch.zeros(1, 32, 32, dtype=torch.half), MXFP8, r"fc1: .* fp32 or bf16, got .*16"),
}


@pytest.mark.parametrize(("master", "format", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_a_master_that_does_not_fit_is_refused_by_name(master, format, message):
    with pytest.raises(LayoutError, match=message):
        quantize(master, format, name="fc1")


def assert_buffers_equal(got, want):
    assert got.buffers().keys() == want.buffers().keys()
    for field, buffer in got.buffers().items():
        assert_bytes_equal(buffer, want.buffers()[field], what=field)
