"""Single codes: which byte every kind of number becomes."""

import math

import pytest
import torch

from moe_optim.formats.reference.codes import (
    decode_e2m1,
    decode_e4m3,
    decode_e8m0,
    e8m0_reciprocal,
    e8m0_round_up,
    encode_e2m1,
    encode_e4m3,
    pack_nibbles,
    unpack_nibbles,
)
from tests.formats.reference import scalar_oracle
from tests.support.bytes import assert_bytes_equal

FLT_MAX = torch.finfo(torch.float32).max

E8M0_CASES = {  # value -> byte: rounds up, saturates at 2^127, only NaN gives 0xFF
    "zero": (0.0, 0x00),
    "smallest subnormal": (2.0**-149, 0x00),
    "just below 2^-127, mantissa 0x3FFFFF": (2.0**-127 - 2.0**-149, 0x00),
    "exactly 2^-127, mantissa 0x400000": (2.0**-127, 0x00),
    "just above 2^-127, mantissa 0x400001": (2.0**-127 + 2.0**-149, 0x01),
    "largest subnormal": (2.0**-126 - 2.0**-149, 0x01),
    "smallest normal": (2.0**-126, 0x01),
    "just above the smallest normal": (2.0**-126 + 2.0**-149, 0x02),
    "just below one": (1 - 2.0**-24, 0x7F),
    "one": (1.0, 0x7F),
    "just above one": (1 + 2.0**-23, 0x80),
    "exactly 2^127": (2.0**127, 0xFE),
    "just above 2^127": (2.0**127 + 2.0**104, 0xFE),
    "largest finite": (FLT_MAX, 0xFE),
    "infinity": (math.inf, 0xFE),
    "nan": (math.nan, 0xFF),
}


def every_bf16():
    return torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)


@pytest.mark.parametrize(("value", "byte"), E8M0_CASES.values(), ids=E8M0_CASES.keys())
def test_e8m0_rounds_up(value, byte):
    assert e8m0_round_up(torch.tensor(value)).item() == byte


def test_e8m0_byte_is_a_power_of_two_and_has_an_exact_reciprocal():
    """2^-127 is a subnormal of bf16 and still exact; only 0xFF is NaN."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    exponents = torch.arange(255, dtype=torch.float64) - 127
    assert torch.equal(decode_e8m0(codes)[:255].double(), exponents.exp2())
    assert torch.equal(e8m0_reciprocal(codes)[:255].double(), (-exponents).exp2())
    assert decode_e8m0(codes)[255].isnan()
    assert e8m0_reciprocal(codes)[255].isnan()


def test_e4m3_encodes_every_bf16_like_the_scalar_definition():
    values = every_bf16()
    want = torch.tensor([scalar_oracle.e4m3(v) for v in values.tolist()], dtype=torch.uint8)
    assert_bytes_equal(encode_e4m3(values), want, what="from bf16")
    assert_bytes_equal(encode_e4m3(values.float()), want, what="from fp32")


def test_e2m1_encodes_every_bf16_and_its_fp32_neighbours_like_the_scalar_definition():
    values = every_bf16().float()
    for towards in (-math.inf, None, math.inf):
        near = values if towards is None else values.nextafter(torch.tensor(towards))
        want = torch.tensor([scalar_oracle.e2m1(v) for v in near.tolist()], dtype=torch.uint8)
        assert_bytes_equal(encode_e2m1(near), want, what=f"towards {towards}")


def test_every_e4m3_code_survives_decoding_and_encoding():
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    decoded = decode_e4m3(codes)
    want = [math.nan if code & 0x7F == 0x7F else scalar_oracle.e4m3_value(code) for code in codes]
    assert torch.equal(decoded.nan_to_num(1e9), torch.tensor(want).nan_to_num(1e9))
    want_codes = codes.clone()
    want_codes[0xFF] = 0x7F  # a NaN loses its sign
    assert_bytes_equal(encode_e4m3(decoded), want_codes)


def test_e2m1_low_nibble_is_the_even_column():
    packed = pack_nibbles(torch.tensor([[0x1, 0x2, 0xF, 0x8]], dtype=torch.uint8))
    assert packed.tolist() == [[0x21, 0x8F]]
    assert unpack_nibbles(packed).tolist() == [[0x1, 0x2, 0xF, 0x8]]
    assert decode_e2m1(packed).tolist() == [[0.5, 1.0, -6.0, 0.0]]
    assert decode_e2m1(packed).signbit().tolist() == [[False, False, True, True]]
