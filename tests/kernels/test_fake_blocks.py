"""The launches of block-scaled fake quantization, without a GPU: values are the reference's."""

import pytest
import torch

from moe_optim.formats import FORMATS
from moe_optim.formats.reference.fake import fake_quantize_blocks
from moe_optim.kernels import tuning
from moe_optim.kernels.fake import find_table
from moe_optim.kernels.tuning import FlatTile
from tests.support.bytes import assert_values_equal
from tests.support.inputs import normal_weights, placed, wide_range_weights, with_specials

every_format = pytest.mark.parametrize(
    "format",
    [
        pytest.param(
            one, id=name, marks=[pytest.mark.extended] * (name in ("mxfp8_rows", "int4_g128"))
        )
        for name, one in FORMATS.items()
        if one.is_row_only
    ],
)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Tiles of which experts have several."""
    for name in ("FAKE_BLOCKS", "FAKE_AMAX"):
        monkeypatch.setattr(tuning, name, FlatTile(numel=256, num_warps=1))


def launched(experts, format):
    result = torch.full((sum(one.numel() for one in experts),), -7.0, dtype=torch.bfloat16)
    find_table(experts).launch_blocks(format, experts[0].dtype, result)
    return result.split([one.numel() for one in experts])


def check(experts, format, what):
    for index, (got, one) in enumerate(zip(launched(experts, format), experts, strict=True)):
        whole = one if one.dim() == 3 else one.unsqueeze(0)
        want = fake_quantize_blocks(whole, format)
        assert_values_equal(got.view(want.shape), want, f"{what}, {index}")


@every_format
def test_values_are_those_of_dequantized_quantized_experts(format, launches):
    """Experts of wide range with special values, all zero and tiny ones, in one launch."""
    tiny = wide_range_weights(3, 128, seed=1, exponents=(-140, -120))
    wide = wide_range_weights(5, 256, seed=2)
    parts = [
        with_specials(wide, every=41),
        torch.zeros(1, 128),
        tiny,
        normal_weights(4, 128),
        with_specials(normal_weights(2, 128), every=150, specials=(torch.nan, -torch.nan)),
    ]
    check([part.bfloat16() for part in parts], format, "bf16")
    assert launches == ["span_amax_kernel"] * format.has_global_amax + ["fake_blocks_kernel"]
    check(parts, format, "fp32")


@every_format
def test_rounding_ties_go_to_even_codes(format, launches):
    """Every quarter of a step between neighbouring codes, of both signs."""
    steps = torch.arange(-128, 128) * (format.data_max / 128)
    check([steps.bfloat16().view(2, 128)], format, "steps")
    check([(steps * 3).bfloat16().view(2, 128)], format, "of another binade")


@every_format
def test_experts_anywhere_in_memory(format, launches):
    parts = [normal_weights(2, 3, 128, seed=i).bfloat16() for i in range(2)]
    for offset in (0, 1):
        places = [placed(part, part.dtype, offset) for part in parts]
        assert find_table(places).aligned == (offset == 0)
        check(places, format, f"offset {offset}")
    places = [placed(part[0], part.dtype, 0) for part in parts[::-1]]
    check(places, format, "[R, C]")
