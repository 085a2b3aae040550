"""Single codes: which byte every kind of number becomes, derived by hand."""

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
    encode_e4m3_,
    pack_nibbles,
    unpack_nibbles,
)
from tests.formats.reference import scalar_oracle
from tests.support.bytes import assert_bytes_equal
from tests.support.inputs import SENTINEL

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

E4M3_CASES = {  # nearest, ties to even, saturating at 448
    "zero": (0.0, 0x00),
    "negative zero": (-0.0, 0x80),
    "half the smallest, a tie": (2.0**-10, 0x00),
    "just above half the smallest": (2.0**-10 * (1 + 2.0**-7), 0x01),
    "smallest subnormal": (2.0**-9, 0x01),
    "tie of subnormals 1 and 2": (1.5 * 2.0**-9, 0x02),
    "tie of subnormals 2 and 3": (2.5 * 2.0**-9, 0x02),
    "tie of largest subnormal and smallest normal": (7.5 * 2.0**-9, 0x08),
    "smallest normal": (2.0**-6, 0x08),
    "one": (1.0, 0x38),
    "tie of 1 and 1.125": (1.0625, 0x38),
    "tie of 1.125 and 1.25": (1.1875, 0x3A),
    "negative": (-1.0, 0xB8),
    "negative that rounds to zero": (-(2.0**-11), 0x80),
    "largest": (448.0, 0x7E),
    "where torch's cast still rounds down": (462.0, 0x7E),
    "where torch's cast gives NaN": (480.0, 0x7E),
    "far too large": (2.0**100, 0x7E),
    "far too large, negative": (-(2.0**100), 0xFE),
    "infinity": (math.inf, 0x7E),
    "negative infinity": (-math.inf, 0xFE),
    "nan": (math.nan, 0x7F),
    "nan with a sign": (-math.nan, 0x7F),
}

E2M1_CASES = {  # nearest, ties to even, saturating at 6
    "zero": (0.0, 0x0),
    "negative zero": (-0.0, 0x8),
    "tie of 0 and 0.5": (0.25, 0x0),
    "just above it": (0.25 + 2.0**-25, 0x1),
    "tie of 0.5 and 1": (0.75, 0x2),
    "just below it": (0.75 - 2.0**-24, 0x1),
    "tie of 1 and 1.5": (1.25, 0x2),
    "just above 1.25": (1.25 + 2.0**-23, 0x3),
    "tie of 1.5 and 2": (1.75, 0x4),
    "just below 1.75": (1.75 - 2.0**-23, 0x3),
    "tie of 2 and 3": (2.5, 0x4),
    "just above 2.5": (2.5 + 2.0**-22, 0x5),
    "tie of 3 and 4": (3.5, 0x6),
    "just below 3.5": (3.5 - 2.0**-22, 0x5),
    "tie of 4 and 6": (5.0, 0x6),
    "just above 5": (5.0 + 2.0**-21, 0x7),
    "negative": (-1.5, 0xB),
    "negative that rounds to zero": (-0.25, 0x8),
    "largest": (6.0, 0x7),
    "too large": (7.0, 0x7),
    "far too large, negative": (-FLT_MAX, 0xF),
    "infinity": (math.inf, 0x7),
    "negative infinity": (-math.inf, 0xF),
    "nan": (math.nan, 0x7),
    "nan with a sign": (-math.nan, 0x7),
    "smallest subnormal": (2.0**-149, 0x0),
}


def every_bf16():
    return torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)


@pytest.mark.parametrize(("value", "byte"), E8M0_CASES.values(), ids=E8M0_CASES.keys())
def test_e8m0_rounds_up(value, byte):
    assert e8m0_round_up(torch.tensor(value)).item() == byte


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("value", "byte"), E4M3_CASES.values(), ids=E4M3_CASES.keys())
def test_e4m3_rounds_to_nearest_even_and_saturates(value, byte, dtype):
    """All values of the table are exact in bf16, so the dtype makes no difference."""
    assert encode_e4m3(torch.tensor([value], dtype=dtype)).item() == byte


@pytest.mark.parametrize(("value", "nibble"), E2M1_CASES.values(), ids=E2M1_CASES.keys())
def test_e2m1_rounds_to_nearest_even_and_saturates(value, nibble):
    assert encode_e2m1(torch.tensor([value])).item() == nibble


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


def test_the_faster_paths_give_the_same_codes_where_their_promise_holds():
    values = torch.linspace(-448, 448, 10_001)
    fast = torch.full(values.shape, SENTINEL, dtype=torch.uint8)
    encode_e4m3_(fast, values, saturate=False)
    assert_bytes_equal(fast, encode_e4m3(values))
    assert_bytes_equal(encode_e2m1(values, has_nan=False), encode_e2m1(values))


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
