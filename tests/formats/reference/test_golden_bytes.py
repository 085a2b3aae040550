"""The reference gives the bytes that other packages gave, of packages that are not installed.

``python -m tools.upstream.golden_bytes`` made the files. Where a package has another rule, its
bytes follow from that rule, so that nothing else differs.
"""

from typing import NamedTuple

import pytest
import torch

from moe_optim.formats import get_format
from moe_optim.formats.reference import dequantize_bf16, quantize
from moe_optim.formats.reference.codes import unpack_nibbles
from tests.support.bytes import assert_bytes_equal
from tests.support.number_formats import float32_oracle
from tests.support.number_formats.golden_bytes import read_golden

E2M1_TIES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.float64)


class Rules(NamedTuple):
    """What a source of MXFP4 does differently; the defaults are ours."""

    ties: str = "even"
    smallest_scale: int = 0
    scale_of_zeros: int = 0
    sign_of_zeros: str = "kept"


MXFP4_RULES = {
    "NVIDIA ModelOpt 0.47.0": Rules(ties="toward zero", sign_of_zeros="negative"),
    "gpt-oss triton_kernels of vLLM 0.33.0": Rules(ties="away from zero", smallest_scale=1),
    "DeepSeek tile-kernels 2.1.0": Rules(smallest_scale=1, scale_of_zeros=1),
    "Megatron-Bridge 067f987d": Rules("toward zero", 0, 127, "positive"),
}


def quantized(weight, format):
    """Return the scale bytes [R, n] and data bytes [R, n] of a weight [R, C]."""
    q = quantize(weight.unsqueeze(0), get_format(format))
    return q.rowwise_scale[0].view(torch.uint8), q.rowwise_data[0]


def mxfp4_by_rules(weight, rules):
    """Return the scale bytes and codes of our scales, and elements found by search in doubles."""
    scale = quantized(weight, "mxfp4")[0].clamp(min=rules.smallest_scale)
    zeros = weight.abs().amax(1, keepdim=True) == 0
    scale = scale.masked_fill(zeros, rules.scale_of_zeros)
    scaled = weight.abs().double() * torch.exp2(127 - scale.double())
    down, up = (torch.bucketize(scaled, E2M1_TIES, right=right) for right in (False, True))
    even = torch.where(down % 2 == 1, up, down)
    code = {"even": even, "toward zero": down, "away from zero": up}[rules.ties]
    is_negative = {
        "kept": weight.signbit(),
        "negative": weight.signbit() | (weight == 0),
        "positive": weight < 0,
    }[rules.sign_of_zeros]
    return scale, (code + 8 * is_negative).to(torch.uint8)


def test_mxfp4_of_the_reference_rounds_to_even_and_keeps_signs():
    weight = read_golden("mxfp4").weight
    scale, data = quantized(weight, "mxfp4")
    expected_scale, expected = mxfp4_by_rules(weight, Rules())
    assert_bytes_equal(scale, expected_scale)
    assert_bytes_equal(unpack_nibbles(data), expected)


@pytest.mark.parametrize("source", MXFP4_RULES)
def test_mxfp4_differs_from_a_source_in_its_rules_of_ties_and_zeros_only(source):
    """Scales are the same from amaxes of 6 * 2^-126 up, and elements but for ties and zeros."""
    weight, sources = read_golden("mxfp4")
    scale, codes = mxfp4_by_rules(weight, MXFP4_RULES[source])
    assert_bytes_equal(sources[source]["scale"], scale)
    assert_bytes_equal(unpack_nibbles(sources[source]["data"]), codes)


def test_every_source_of_mxfp4_has_its_rules():
    assert MXFP4_RULES.keys() == read_golden("mxfp4").sources.keys()


MXFP8_SMALLEST = {  # source -> smallest amax that gives our bytes
    "gpt-oss triton_kernels of vLLM 0.33.0": 448 * 2.0**-126,
    "DeepSeek tile-kernels 2.1.0": 1e-4,
}


@pytest.mark.parametrize("source", MXFP8_SMALLEST)
def test_mxfp8_rows_equals_a_source_unless_all_elements_are_tiny(source):
    """Below, DeepSeek raises the amax to 1e-4, and gpt-oss's scale is 2^-126 at least."""
    weight, sources = read_golden("mxfp8_rows")
    scale, data = quantized(weight, "mxfp8_rows")
    kept = weight.abs().amax(1) >= MXFP8_SMALLEST[source]
    assert kept.sum() > 25
    assert_bytes_equal(sources[source]["scale"][kept], scale[kept])
    assert_bytes_equal(sources[source]["data"][kept], data[kept])
    assert (sources[source]["scale"] >= scale).all()


def test_nvfp4_rows_equals_transformer_engine():
    weight, sources = read_golden("nvfp4_rows")
    theirs = sources["Transformer Engine 2.20.2"]
    scale, data = quantized(weight, "nvfp4_rows")
    assert_bytes_equal(theirs["scale"], scale)
    assert_bytes_equal(theirs["data"], data)
    amax = theirs["global_amax"].view(torch.float32).flatten()
    assert_bytes_equal(amax, weight.abs().amax().float().view(1))


def test_fp8_block_fp32_equals_transformer_engine():
    """Each four rows are a block: weights smaller than 128x128."""
    weight, sources = read_golden("fp8_block_fp32")
    theirs = sources["Transformer Engine 2.20.2"]
    ours = quantize(weight.view(-1, 4, 32), get_format("fp8_block_fp32"))
    assert_bytes_equal(theirs["scale"].view(torch.float32).flatten(), ours.rowwise_scale.flatten())
    assert_bytes_equal(theirs["data"], ours.rowwise_data.flatten(0, 1))


def test_int4_equals_the_export_of_slime():
    weight, sources = read_golden("int4")
    scale, data = quantized(weight, "int4")
    assert_bytes_equal(sources["slime 624b824a"]["scale"], scale)
    assert_bytes_equal(sources["slime 624b824a"]["data"], data)


def test_int4_differs_from_megatron_bridge_in_the_divisor_and_the_smallest_scale_only():
    """Its scales are amax / 7, at least 1e-10: ours are amax * fl(1/7), at least 1e-5.

    The golden weight has every tie of amaxes that 7 divides, so codes differ there; and blocks of
    tiny weights, which have scales of their own there.
    """
    weight, sources = read_golden("int4")
    theirs = sources["Megatron-Bridge 067f987d"]
    settings = {"divide": True, "smallest": 1e-10}
    scale, codes = float32_oracle.int4(weight.float().numpy(), 32, **settings)
    stored = torch.from_numpy(float32_oracle.to_bf16(scale)).bfloat16().unsqueeze(1)
    assert_bytes_equal(theirs["scale"].view(torch.bfloat16), stored)
    nibbles = torch.from_numpy(codes + 8).to(torch.uint8)
    assert_bytes_equal(unpack_nibbles(theirs["data"]), nibbles)

    ours, data = quantized(weight, "int4")
    amax = weight.abs().amax(1, keepdim=True).double()
    kept = amax[:, 0] >= 7e-5
    assert_bytes_equal(theirs["scale"][kept], ours[kept])
    off = (unpack_nibbles(data) != nibbles) & kept.unsqueeze(1)
    assert off.any()
    assert ((weight.double() * 14 / amax)[off] % 2 == 1).all()


def test_fake_int4_of_slime_and_miles_multiplies_by_the_unrounded_scale():
    weight, sources = read_golden("int4")
    theirs = sources["radixark's Megatron-LM 2e64d788"]["values"].view(torch.bfloat16)
    scale, codes = float32_oracle.int4(weight.float().numpy(), 32, divide=True)
    fake = torch.from_numpy(float32_oracle.to_bf16(codes * scale[:, None])).bfloat16()
    assert_bytes_equal(theirs, fake)
    q = quantize(weight.unsqueeze(0), get_format("int4"))
    ours = dequantize_bf16(q.rowwise_data, q.rowwise_scale, q.format)[0]
    assert (ours != theirs).float().mean() > 0.05
