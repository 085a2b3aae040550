"""One scale a weight: what the reference makes of amaxes and elements, derived apart from it."""

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_optim.formats.reference import tensorwise
from tests.formats.reference import scalar_oracle as oracle
from tests.support.bytes import assert_bytes_equal
from tests.support.inputs import wide_range_weights, with_specials

FLT_MAX = torch.finfo(torch.float32).max
SCALES = {
    "zero": (0.0, 1.0),
    "Inf": (math.inf, 1.0),
    "NaN": (math.nan, 1.0),
    "448": (448.0, 1.0),
    "one": (1.0, 448.0),
    "three, whose quotient is rounded": (3.0, struct.unpack("f", b"\x55\x55\x15\x43")[0]),
    "the smallest that does not overflow": (448.0 * 2.0**-120, 2.0**120),
    "a quotient beyond FLT_MAX": (2.0**-120, FLT_MAX),
    "subnormal": (2.0**-133, FLT_MAX),
}
"""Name -> amax, scale."""
CODES = {
    "zero": (0.0, 0x00),
    "minus zero": (-0.0, 0x80),
    "the amax": (448.0, 0x7E),
    "minus the amax": (-448.0, 0xFE),
    "beyond the amax": (1000.0, 0x7E),
    "Inf": (math.inf, 0x7E),
    "minus Inf": (-math.inf, 0xFE),
    "NaN": (math.nan, 0x7F),
    "minus NaN": (-math.nan, 0x7F),
    "a tie of codes, down to even": (17.0, 0x58),
    "a tie of codes, up to even": (19.0, 0x5A),
    "above a tie, but not in bf16": (17.0 + 2.0**-5, 0x58),
    "half of the smallest code": (2.0**-10, 0x00),
    "the smallest code": (2.0**-9, 0x01),
}
"""Name -> element of a weight whose scale is 1, code."""


@pytest.mark.parametrize("name", SCALES)
def test_special_amaxes(name):
    amax, scale = SCALES[name]
    assert_bytes_equal(tensorwise.encode_scale(torch.tensor([amax])), torch.tensor([scale]))


@pytest.mark.parametrize("name", CODES)
def test_special_elements(name):
    value, code = CODES[name]
    out = torch.zeros(1, dtype=torch.uint8)
    tensorwise.cast_into(out, torch.tensor([value]), torch.ones(1))
    assert_bytes_equal(out, torch.tensor([code], dtype=torch.uint8), what=name)


@settings(max_examples=40)
@given(seed=st.integers(0, 99), numel=st.integers(1, 60), amax=st.integers(-40, 40))
def test_codes_are_those_of_exact_arithmetic(seed, numel, amax):
    """Of scalars: bf16, a product in fp32, the nearest code."""
    source = with_specials(wide_range_weights(numel, seed=seed), every=7)
    scale = tensorwise.encode_scale(torch.tensor([2.0**amax * 1.3]))
    out = torch.zeros(numel, dtype=torch.uint8)
    tensorwise.cast_into(out, source, scale)
    factor = scale.item()
    want = [oracle.e4m3(oracle.fp32(oracle.bf16(value) * factor)) for value in source.tolist()]
    assert_bytes_equal(out, torch.tensor(want, dtype=torch.uint8))
