"""Special values and the bytes they become, derived by hand: one table that binds every backend.

No byte here comes from running code. Above each case stands its derivation, in these terms:

- E4M3 value ``1.m * 2^e`` has the code ``(e + 7) << 3 | m`` with three bits of m; below 2^-6 codes
  are steps of 2^-9. So 448 = 1.75 * 2^8 is 0x7E, 256 is 0x78, 1 is 0x38. E2M1 codes 0 to 7 are
  0, 0.5, 1, 1.5, 2, 3, 4, 6. A sign adds 0x80 or 0x8.
- bf16 has 7 bits of m: the step is 2 at 448 and 2^-7 at 1; below 2^-126 it is 2^-133.
- fl() rounds to fp32, and ulp is its step there, 2^-23 for a value between 1 and 2.
  fl(1/448) = (1/448)(1 + 3/8 ulp) and fl(1/6) = (1/6)(1 + 1/4 ulp), both ulp being 2^-23.
- mxfp8: v = fl(amax * fl(1/448)). An amax of 448 * 2^k gives fl(2^k (1 + 3/8 ulp)) = 2^k, whose
  mantissa is zero: byte 127 + k. The next bf16 has a mantissa and gives one more.
- fp8_block: factor = 448 / amax without its mantissa. That is the same power of two as in mxfp8,
  apart from amaxes of zero and Inf, where it is 1. The inverse is stored.
- nvfp4: an expert of amax 6 has S_enc 448, and one of amax 2688 has S_enc 1. Either way a block
  with that amax has t = 448 or one ulp more, 0x7E. With S_enc 448 its factor is
  1 / fl(448 * fl(1/448)) = 1: data are the weights. With S_enc 1 a block of amax A has
  t = fl(A * fl(1/6)) = A / 6 wherever a comment says A / 6 is a tie, for 1/4 ulp rounds away.
- mxfp4: v = fl(amax * fl(1/6)). An amax of 6 * 2^k gives 2^k: byte 127 + k.
- int4: nibble n is n - 8. fl(1/7) = (1/7)(1 + 3/8 ulp), so that an amax of 7 * 2^k gives s = 2^k.
  s is at least fl(1e-5) = 0x3727C5AC, bf16 0x3728.
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from moe_optim.formats import QuantizedWeight, get_format

Kind = Literal[
    "all zeros",
    "zero block beside another",
    "negative zero",
    "rounded to bf16 first",
    "bf16 subnormals",
    "largest finite",
    "infinity",
    "nan alone",
    "nan beside finite",
    "amax near a power of two",
    "amax near a scale step",
    "saturating",
    "ties to even",
    "rounds to zero",
    "directions differ",  # mxfp8
    "partial edge block",  # fp8_block
    "block far below the expert",  # nvfp4 and nvfp4_rows, like the rest
    "subnormal global amax",
    "infinite global amax",
]
Position = tuple[int, int]


class Bits(int):
    """A weight given by its fp32 bits: a NaN whose sign and payload matter."""


class Element(NamedTuple):
    """A weight and its code: a byte of E4M3, or a nibble of E2M1 or INT4."""

    value: float | Bits
    code: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecialCase:
    """One weight [1, rows, cols], full of ``fill`` apart from ``elements``, and all its bytes.

    Positions are logical (row, col) of the element, also for the scale of its block.
    Scales are bytes, or the bits of bf16 for INT4 and of the fp32 inverse for FP8 blocks.
    """

    name: str
    """Key of the case in ``SPECIAL_CASES``."""
    kind: Kind
    format: str
    shape: tuple[int, int]
    fill: float | Bits = 0.0
    fill_code: int = 0x0
    fill_scale: int
    """Scale of every block that ``scales`` does not name."""
    elements: Mapping[Position, Element] = field(default_factory=dict)
    scales: Mapping[Position, int] = field(default_factory=dict)
    """Scale of the block that holds the element there, in both directions."""
    columnwise_codes: Mapping[Position, int] = field(default_factory=dict)
    """Where the code is not the one of ``elements`` or ``fill_code``."""
    columnwise_scales: Mapping[Position, int] = field(default_factory=dict)
    """Where the scale is not the one of ``scales`` or ``fill_scale``."""
    global_amax: int | None = None
    """fp32 bits of the expert's amax, for formats that have one."""


def special_weight(case: SpecialCase) -> Tensor:
    """Return the weight of ``case``, [1, R, C] fp32 on the CPU."""
    bits = torch.full(case.shape, _fp32_bits(case.fill), dtype=torch.int64)
    for position, element in case.elements.items():
        bits[position] = _fp32_bits(element.value)
    return bits.to(torch.int32).view(torch.float32).unsqueeze(0)


def fits_bf16(case: SpecialCase) -> bool:
    """Return whether bf16 holds every weight of ``case`` exactly."""
    values = [case.fill, *(element.value for element in case.elements.values())]
    return all(_fp32_bits(value) & 0xFFFF == 0 for value in values)


def assert_special_case(case: SpecialCase, quantized: QuantizedWeight) -> None:
    """Fail unless every byte of every buffer is the one that ``case`` derives.

    The message lists the first mismatches: buffer, position, and both values in hex. Data positions
    are logical elements (row, col), also where a buffer is packed or transposed; scale positions
    are those in the logical scale buffer.
    """
    got = f"{quantized.format.name} {list(quantized.shape)}"
    assert got == f"{case.format} {[1, *case.shape]}", f"{case.name}: got storage for {got}"
    element_digits = quantized.format.element_bits // 4
    scale_digits = 2 * quantized.format.scale_dtype.itemsize
    mismatches = []
    for direction in quantized.format.directions:
        codes = _element_codes(quantized, direction), _expected_codes(case, direction)
        scales = _unsigned(quantized.scale(direction)[0]), _expected_scales(case, direction)
        mismatches += _mismatches(f"{direction}_data", *codes, element_digits)
        mismatches += _mismatches(f"{direction}_scale", *scales, scale_digits)
    if case.global_amax is not None:
        amax = _unsigned(quantized.global_amax), torch.tensor([case.global_amax])
        mismatches += _mismatches("global_amax", *amax, 8)
    if mismatches:
        shown = "\n  ".join(mismatches[:8])
        raise AssertionError(f"{case.name}: mismatches: {len(mismatches)}\n  {shown}")


def _mismatches(buffer, got, want, digits):
    return [
        f"{buffer} {list(position)}: "
        f"got 0x{int(got[position]):0{digits}X}, expected 0x{int(want[position]):0{digits}X}"
        for position in map(tuple, (got != want).nonzero().tolist())
    ]


def _element_codes(quantized, direction):
    """Return the codes of one data buffer at their logical positions, [R, C] int64."""
    data = _unsigned(quantized.data(direction)[0])
    if quantized.format.elements_per_byte == 2:
        data = torch.stack((data & 0xF, data >> 4), dim=-1).flatten(1)
    return data.T if quantized.format.transposes(direction) else data


def _expected_codes(case, direction):
    codes = torch.full(case.shape, case.fill_code)
    for position, element in case.elements.items():
        codes[position] = element.code
    if direction == "columnwise":
        for position, code in case.columnwise_codes.items():
            codes[position] = code
    return codes


def _expected_scales(case, direction):
    format = get_format(case.format)
    columnwise = direction == "columnwise"
    named = {**case.scales, **(case.columnwise_scales if columnwise else {})}
    transposed = format.is_2d and columnwise
    block_rows, block_cols = format.block(direction)
    scales = torch.full(format.scale_shape((1, *case.shape), direction)[1:], case.fill_scale)
    for (row, col), scale in named.items():
        block = row // block_rows, col // block_cols
        scales[block[::-1] if transposed else block] = scale
    return scales


def _unsigned(buffer):
    """Return the bits of a buffer as int64, on the CPU."""
    unsigned = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[buffer.element_size()]
    return buffer.detach().cpu().contiguous().view(unsigned).long()


def _fp32_bits(value):
    if isinstance(value, Bits):
        return int(value)
    packed = struct.pack("<f", value)
    assert struct.unpack("<f", packed)[0] == value, f"{value!r} is no fp32 value"
    return struct.unpack("<I", packed)[0]


# Recipes: a function of name, kind and format. An E4M3 scale is given as (E8M0 byte, bits of the
# fp32 inverse), since the same case serves ``mxfp8``, ``mxfp8_2d``, ``mxfp8_rows`` and
# ``fp8_block``.

_ZEROS = (0x00, 0x3F80_0000)  # amax 0: byte 0x00; factor 1, its inverse 2^0
_ZERO_SCALE = {"e8m0": 0x00, "e4m3": 0x00, "bf16": 0x3728, "power_of_two": _ZEROS[1],
               "fp32": _ZEROS[1]}  # fmt: skip
_ZERO_CODE = {"e4m3": 0x00, "e2m1": 0x0, "int4": 0x8}


def _side(format):
    return get_format(format).block_length


def _zero_scale(format):
    return _ZERO_SCALE[get_format(format).scale_encoding]


def _scale_for(format, scale):
    return scale if isinstance(scale, int) else scale[get_format(format).scale_itemsize == 4]


def _stairs(format, pairs, row=0, col=0):
    """Put the k-th (value, code) in row k + 1 and column k + k // 2 of the block at (row, col).

    All parities occur, no two share a row or a column, and 11 fit in the smallest block. They all
    share the first row of blocks that are no higher.
    """
    assert len(pairs) <= 11, "a block of 16 columns holds 11 steps"
    down = 0 if get_format(format).is_row_only else 1
    return {
        (row + down * (k + 1), col + k + k // 2): Element(*pair) for k, pair in enumerate(pairs)
    }


def _full(fill, code, scale, *pairs, global_amax=None):
    """Return one block full of ``fill``, whose amax is that of every row and column of it."""
    return lambda name, kind, format: SpecialCase(
        name=name,
        kind=kind,
        format=format,
        shape=(_side(format), _side(format)),
        fill=fill,
        fill_code=code,
        fill_scale=_scale_for(format, scale),
        elements=_stairs(format, pairs),
        global_amax=global_amax,
    )


def _grid(blocks, *, size=(1, 1), fill=0.0, fill_code=None, global_amax=None):
    """Return blocks (row, col) -> (scale, *(value, code)) among zeros, all other blocks zero too.

    Several elements in one block are not for ``mxfp8``, where they have rows of their own.
    """

    def recipe(name, kind, format):
        side = _side(format)
        steps = {
            block: _stairs(format, pairs, side * block[0], side * block[1])
            for block, (_, *pairs) in blocks.items()
        }
        return SpecialCase(
            name=name,
            kind=kind,
            format=format,
            shape=(side * size[0], side * size[1]),
            fill=fill,
            fill_code=_ZERO_CODE[get_format(format).element] if fill_code is None else fill_code,
            fill_scale=_zero_scale(format),
            elements={position: e for block in steps.values() for position, e in block.items()},
            scales={
                position: _scale_for(format, blocks[block][0])
                for block, elements in steps.items()
                for position in elements
            },
            global_amax=global_amax,
        )

    return recipe


def _alone(value, code, scale, *, fill=0.0, fill_code=None, global_amax=None):
    """Return one element among zeros of either sign."""
    blocks = {(0, 0): (scale, (value, code))}
    return _grid(blocks, fill=fill, fill_code=fill_code, global_amax=global_amax)


def _row(global_amax, *blocks):
    """Return an expert of blocks (scale, *(value, code)) side by side."""
    numbered = {(0, k): block for k, block in enumerate(blocks)}
    return _grid(numbered, size=(1, len(blocks)), global_amax=global_amax)


def _placed(shape, **fields):
    """Return zeros of any shape with elements and scales at positions of their own."""
    return lambda name, kind, format: SpecialCase(
        name=name, kind=kind, format=format, shape=shape, fill_scale=_zero_scale(format), **fields
    )


_INF = math.inf
_NAN, _NEGATIVE_NAN = Bits(0x7FC0_0000), Bits(0xFFC0_0000)
_LOW_NANS = Bits(0x7F80_0001), Bits(0x7FFF_FFFF), Bits(0xFFFF_FFFF)
"""NaNs that integer rounding to bf16 makes Inf (dropping the payload), -0 and +0 (carrying)."""
_LARGEST = 2.0**128 - 2.0**120  # bf16 0x7F7F, 1.9921875 * 2^127
_ABOVE_448, _BELOW_448 = 450 / 256, 446 / 256  # bf16 neighbours of 1.75

# fmt: off
_E4M3 = {
    "all zeros": {
        "zeros everywhere": _full(0.0, 0x00, _ZEROS),
    },
    "zero block beside another": {
        # 448 has scale 2^0 and code 0x7E; the other block is one of zeros.
        "zeros left of 448": _grid({(0, 1): ((0x7F, 0x3F80_0000), (448.0, 0x7E))}, size=(1, 2)),
        "zeros above 448": _grid({(1, 0): ((0x7F, 0x3F80_0000), (448.0, 0x7E))}, size=(2, 1)),
        # 448: 2^0. -896 = -448 * 2: 2^1, -448 is 0xFE. 1: 2^-8, 256 is 0x78. And zeros.
        "four blocks of four scales": _grid(
            {
                (0, 0): ((0x7F, 0x3F80_0000), (448.0, 0x7E)),
                (0, 1): ((0x80, 0x4000_0000), (-896.0, 0xFE)),
                (1, 0): ((0x77, 0x3B80_0000), (1.0, 0x78)),
            },
            size=(2, 2),
        ),
    },
    "negative zero": {
        "negative zeros everywhere": _full(-0.0, 0x80, _ZEROS),
        "448 among negative zeros": _alone(
            448.0, 0x7E, (0x7F, 0x3F80_0000), fill=-0.0, fill_code=0x80
        ),
        # A positive factor keeps the sign: -0 is 0x80, +0 is 0x00.
        "zeros of both signs among 448": _full(
            448.0, 0x7E, (0x7F, 0x3F80_0000), (-0.0, 0x80), (0.0, 0x00)
        ),
    },
    "rounded to bf16 first": {
        # 449 is midway between 448 (0x43E0, even) and 450: 448, scale 2^0, 0x7E.
        "449 is a tie and becomes 448": _alone(449.0, 0x7E, (0x7F, 0x3F80_0000)),
        # The next fp32 becomes 450, scale 2^1, and 225 is nearest to 224 = 1.75 * 2^7: 0x76.
        "just above 449 becomes 450": _alone(449 + 2.0**-15, 0x76, (0x80, 0x4000_0000)),
        # 447 is midway between 446 (0x43DF, odd) and 448: 448.
        "447 is a tie and becomes 448": _alone(447.0, 0x7E, (0x7F, 0x3F80_0000)),
        # bf16 has the step 1/8 here and E4M3 has 2; 16 is 0x58, 18 is 0x59, 20 is 0x5A.
        # 17.0625: tie of 17 (m = 8, even) and 17.125; 17 is a tie of 16 and 18 again: 16.
        # The next fp32 is 17.125 in bf16: 18. 18.9375: tie of 18.875 (m = 23) and 19 (m = 24):
        # 19, which is a tie of 18 and 20: 20. The fp32 before is 18.875: 18.
        # Without bf16 in between, 17.0625 would be 18 and 18.9375 would be 18.
        "ties twice, in bf16 and in e4m3": _full(
            448.0, 0x7E, (0x7F, 0x3F80_0000), (17.0625, 0x58), (17.0625 + 2.0**-19, 0x59),
            (18.9375, 0x5A), (18.9375 - 2.0**-19, 0x59), (-17.0625, 0xD8), (-18.9375, 0xDA),
        ),
        # 2^-134 is midway between 0 and 2^-133 (bits 1, odd): 0, and zeros they all are.
        "2^-134 is a tie and becomes zero": _full(
            0.0, 0x00, _ZEROS, (2.0**-134, 0x00), (-(2.0**-134), 0x80), (-(2.0**-149), 0x80)
        ),
        # The next fp32 becomes 2^-133; times 2^127 that is 2^-6: 0x08. The inverse is 2^-127.
        "just above 2^-134 becomes 2^-133": _alone(
            2.0**-134 + 2.0**-149, 0x08, (0x00, 0x0040_0000)
        ),
        # Midway between 2^-133 (bits 1, odd) and 2^-132; times 2^127 that is 2^-5: 0x10.
        "3 * 2^-134 is a tie and becomes 2^-132": _alone(3 * 2.0**-134, 0x10, (0x00, 0x0040_0000)),
        # Bits 0x7F7F8000 are midway between 0x7F7F (odd) and Inf, 0x7F80: Inf, see there.
        "2^128 - 2^119 is a tie and becomes infinity": _alone(
            Bits(0x7F7F_8000), 0x7E, (0xFE, 0x3F80_0000)
        ),
        "the largest fp32 becomes infinity": _alone(Bits(0xFF7F_FFFF), 0xFE, (0xFE, 0x3F80_0000)),
        # Becomes 0x7F7F, the largest finite bf16, see there.
        "just below 2^128 - 2^119 stays finite": _alone(
            Bits(0x7F7F_7FFF), 0x78, (0xF7, 0x7B80_0000)
        ),
    },
    "bf16 subnormals": {
        # v is below 2^-127: byte 0x00. 448 / amax overflows: FLT_MAX without its mantissa, 2^127.
        # Both give the factor 2^127 and the inverse 2^-127. 2^-6 is 0x08, 2 is 0x40.
        "the smallest subnormal": _alone(2.0**-133, 0x08, (0x00, 0x0040_0000)),
        "full of the negative smallest subnormal": _full(-(2.0**-133), 0x88, (0x00, 0x0040_0000)),
        # 127 * 2^-133 * 2^127 = 1.984375, between 1.875 and 2: 2.
        "the largest subnormal": _alone(2.0**-126 - 2.0**-133, 0x40, (0x00, 0x0040_0000)),
        "the smallest normal": _alone(2.0**-126, 0x40, (0x00, 0x0040_0000)),
    },
    "largest finite": {
        # v = 1.9921875 * 8/7 * 2^118 = 1.138 * 2^119: 246 + 1 = 0xF7, 2^120.
        # 448 / amax = 1.757 * 2^-120. Either way 1.9921875 * 2^7 = 255 is nearest to 256: 0x78.
        "the largest finite": _alone(_LARGEST, 0x78, (0xF7, 0x7B80_0000)),
        "the negative largest finite": _alone(-_LARGEST, 0xF8, (0xF7, 0x7B80_0000)),
    },
    "infinity": {
        # mxfp8: v = Inf gives 0xFE, factor 2^-127. fp8_block: 1. Inf saturates to 448 in both.
        "infinity alone": _alone(_INF, 0x7E, (0xFE, 0x3F80_0000)),
        "negative infinity alone": _alone(-_INF, 0xFE, (0xFE, 0x3F80_0000)),
        "infinity among negative zeros": _alone(
            _INF, 0x7E, (0xFE, 0x3F80_0000), fill=-0.0, fill_code=0x80
        ),
        "infinities and nan": _full(
            _INF, 0x7E, (0xFE, 0x3F80_0000), (-_INF, 0xFE), (_NAN, 0x7F), (_NEGATIVE_NAN, 0x7F)
        ),
    },
    "nan alone": {
        # An amax ignores NaN and is 0; NaN is 0x7F whatever its sign.
        "nan alone": _alone(_NAN, 0x7F, _ZEROS),
        "negative nan alone": _alone(_NEGATIVE_NAN, 0x7F, _ZEROS),
        "nan everywhere": _full(_NAN, 0x7F, _ZEROS),
        "nans below bf16 alone": _full(0.0, 0x00, _ZEROS, *((nan, 0x7F) for nan in _LOW_NANS)),
    },
    "nan beside finite": {
        # The scale is that of 448, and of 1 with its factor 256: 0x78.
        "nan among 448": _full(
            448.0, 0x7E, (0x7F, 0x3F80_0000), (_NAN, 0x7F), (_NEGATIVE_NAN, 0x7F),
            *((nan, 0x7F) for nan in _LOW_NANS),
        ),
        "nan among -1": _full(-1.0, 0xF8, (0x77, 0x3B80_0000), (_NAN, 0x7F), (_NEGATIVE_NAN, 0x7F)),
    },
    "amax near a power of two": {
        # v = 8/7 * 2^-9: 118 + 1 = 0x77, 2^-8. 448 / 1 = 1.75 * 2^8. 1 * 2^8 is 0x78.
        "one": _alone(1.0, 0x78, (0x77, 0x3B80_0000)),
        "minus one": _alone(-1.0, 0xF8, (0x77, 0x3B80_0000)),
        "full of one": _full(1.0, 0x78, (0x77, 0x3B80_0000)),
        # 258 and 255 are both nearest to 256.
        "the bf16 above one": _alone(1 + 2.0**-7, 0x78, (0x77, 0x3B80_0000)),
        "the bf16 below one": _alone(1 - 2.0**-8, 0x78, (0x77, 0x3B80_0000)),
        # v = 256 / 448 = 8/7 * 2^-1: 126 + 1 = 0x7F. 448 / 256 = 1.75.
        "256": _alone(256.0, 0x78, (0x7F, 0x3F80_0000)),
        "the bf16 above 256": _alone(258.0, 0x78, (0x7F, 0x3F80_0000)),
        "the bf16 below 256": _alone(255.0, 0x78, (0x7F, 0x3F80_0000)),
    },
    "amax near a scale step": {
        # v = fl(1 + 3/8 ulp) = 1: 0x7F. 446 is nearest to 448. 450: v > 1, and 225 gives 224.
        "448": _alone(448.0, 0x7E, (0x7F, 0x3F80_0000)),
        "the bf16 below 448": _alone(446.0, 0x7E, (0x7F, 0x3F80_0000)),
        "the bf16 above 448": _alone(450.0, 0x76, (0x80, 0x4000_0000)),
        # The same a power of two lower: 223 * 2 = 446, 225 * 1 gives 224.
        "224": _alone(224.0, 0x7E, (0x7E, 0x3F00_0000)),
        "the bf16 below 224": _alone(223.0, 0x7E, (0x7E, 0x3F00_0000)),
        "the bf16 above 224": _alone(225.0, 0x76, (0x7F, 0x3F80_0000)),
        "minus 896": _alone(-896.0, 0xFE, (0x80, 0x4000_0000)),
        # 448 * 2^-126: v = 2^-126, bits 0x00800000, byte 0x01.
        "448 * 2^-126": _alone(1.75 * 2.0**-118, 0x7E, (0x01, 0x0080_0000)),
        "the bf16 above 448 * 2^-126": _alone(_ABOVE_448 * 2.0**-118, 0x76, (0x02, 0x0100_0000)),
        # 448 * 2^-127: v = 2^-127, bits 0x00400000, the last subnormal of byte 0x00.
        # 448 / amax = 2^127, the largest factor there is; the bf16 above has 0.996 * 2^127.
        "448 * 2^-127": _alone(1.75 * 2.0**-119, 0x7E, (0x00, 0x0040_0000)),
        "the bf16 below 448 * 2^-127": _alone(_BELOW_448 * 2.0**-119, 0x7E, (0x00, 0x0040_0000)),
        "the bf16 above 448 * 2^-127": _alone(_ABOVE_448 * 2.0**-119, 0x76, (0x01, 0x0080_0000)),
        # 448 / amax = 2^128 overflows, and 1.99 * 2^127 above it does not: 2^127 for both.
        # 224 is 0x76, and 225 gives 224.
        "448 * 2^-128": _alone(1.75 * 2.0**-120, 0x76, (0x00, 0x0040_0000)),
        "the bf16 above 448 * 2^-128": _alone(_ABOVE_448 * 2.0**-120, 0x76, (0x00, 0x0040_0000)),
        # 448 * 2^119: v = 2^119, 246 = 0xF6. Above, 247 and 225.
        "448 * 2^119": _alone(1.75 * 2.0**127, 0x7E, (0xF6, 0x7B00_0000)),
        "the bf16 above 448 * 2^119": _alone(_ABOVE_448 * 2.0**127, 0x76, (0xF7, 0x7B80_0000)),
    },
    "ties to even": {
        # 16 is 0x58, 18 is 0x59, 20 is 0x5A: 17 and 19 are the ties, 15.5 that of 15 (0x57) and
        # 16, 432 that of 416 (0x7D) and 448. 17.125 and 18.875 are bf16 neighbours of ties.
        "ties of normal codes": _full(
            448.0, 0x7E, (0x7F, 0x3F80_0000), (17.0, 0x58), (19.0, 0x5A), (-17.0, 0xD8),
            (-19.0, 0xDA), (17.125, 0x59), (18.875, 0x59), (16.875, 0x58), (19.125, 0x5A),
            (15.5, 0x58), (432.0, 0x7E), (430.0, 0x7D),
        ),
        # In steps of 2^-9: 0.5 -> 0, 1.5 -> 2, 2.5 -> 2, 3.5 -> 4, 6.5 -> 6, 7.5 -> 8 (2^-6).
        # bf16 neighbours of 0.5: 0.504 -> 1, 0.498 -> 0.
        "ties of subnormal codes": _full(
            448.0, 0x7E, (0x7F, 0x3F80_0000), (2.0**-10, 0x00), (-(2.0**-10), 0x80),
            (3 * 2.0**-10, 0x02), (-5 * 2.0**-10, 0x82), (7 * 2.0**-10, 0x04),
            (13 * 2.0**-10, 0x06), (15 * 2.0**-10, 0x08), ((1 + 2.0**-7) * 2.0**-10, 0x01),
            (-(1 - 2.0**-8) * 2.0**-10, 0x80),
        ),
        # The factor is 256: 17 / 256 is 17 again, and 2^-18 is half a step.
        "ties below an amax of one": _full(
            1.0, 0x78, (0x77, 0x3B80_0000), (17 * 2.0**-8, 0x58), (-19 * 2.0**-8, 0xDA),
            (2.0**-18, 0x00), (3 * 2.0**-18, 0x02),
        ),
    },
    "rounds to zero": {
        "below half a step among 448": _full(
            448.0, 0x7E, (0x7F, 0x3F80_0000), (2.0**-11, 0x00), (-(2.0**-11), 0x80),
            (2.0**-133, 0x00), (-(2.0**-133), 0x80),
        ),
        # The factor is 2^-120: 2^120 is 1, 2^111 one step, 2^110 half a step, 3 * 2^110 is 1.5.
        # -2^-133 * 2^-120 is below every fp32 and keeps its sign.
        "small beside the largest finite": _full(
            _LARGEST, 0x78, (0xF7, 0x7B80_0000), (2.0**120, 0x38), (2.0**111, 0x01),
            (2.0**110, 0x00), (-(2.0**110), 0x80), (3 * 2.0**110, 0x02), (1.0, 0x00), (-1.0, 0x80),
            (2.0**-133, 0x00), (-(2.0**-133), 0x80),
        ),
    },
}

_E8M0 = {
    "saturating": {
        # The factor is 2^-127: only Inf saturates. 1.992 gives 2 (0x40), 2^127 is 1 (0x38),
        # 2^118 one step, 2^117 half a step, 3 * 2^117 is 1.5 steps; 1 and -1 are too small.
        "finite among infinity": _full(
            _INF, 0x7E, 0xFE, (-_INF, 0xFE), (_LARGEST, 0x40), (-_LARGEST, 0xC0), (2.0**127, 0x38),
            (2.0**118, 0x01), (2.0**117, 0x00), (-(2.0**117), 0x80), (3 * 2.0**117, 0x02),
            (1.0, 0x00), (-1.0, 0x80), (_NAN, 0x7F),
        ),
    },
}

_MXFP8_1D = {
    "directions differ": {
        # Row 0 has amax 448 (2^0, 1 is 0x38), row 1 has 896 (2^1, 448 is 0x7E).
        # Column 0 has 448. Column 1 has 896, so that there 1 is 0.5: 0x30.
        "448 and one above 896": _placed(
            (32, 32),
            elements={
                (0, 0): Element(448.0, 0x7E), (0, 1): Element(1.0, 0x38),
                (1, 1): Element(896.0, 0x7E),
            },
            scales={(0, 0): 0x7F, (1, 1): 0x80}, columnwise_codes={(0, 1): 0x30},
        ),
        # Row 0 holds NaN and 1 (0x77, 0x78); column 0 holds NaN only (0x00); column 1 as row 0.
        "nan and one": _placed(
            (32, 32), elements={(0, 0): Element(_NAN, 0x7F), (0, 1): Element(1.0, 0x78)},
            scales={(0, 0): 0x77, (0, 1): 0x77}, columnwise_scales={(0, 0): 0x00},
        ),
        # Row 3 and column 7 have 0xFE, where 1 * 2^-127 gives 0. Elsewhere 1 has 0x77 and is 0x78.
        "infinity among ones spoils a row and a column": _placed(
            (32, 32),
            elements={
                (row, col): Element(1.0, 0x00 if row == 3 else 0x78)
                for row in range(32)
                for col in range(32)
            }
            | {(3, 7): Element(_INF, 0x7E)},
            scales={(k, k): 0x77 for k in range(32)} | {(3, 3): 0xFE},
            columnwise_codes={(3, col): 0x78 for col in range(32) if col != 7}
            | {(row, 7): 0x00 for row in range(32) if row != 3},
            columnwise_scales={(3, 3): 0x77, (7, 7): 0xFE},
        ),
    },
}

_FP8_BLOCK = {
    "saturating": {
        # The factor is 1, and all above 448 saturates; 464 and more would be NaN without a clamp.
        "finite among infinity": _full(
            _INF, 0x7E, 0x3F80_0000, (450.0, 0x7E), (464.0, 0x7E), (466.0, 0x7E), (-480.0, 0xFE),
            (_LARGEST, 0x7E), (-_LARGEST, 0xFE), (-_INF, 0xFE), (1.0, 0x38), (2.0**-133, 0x00),
            (-(2.0**-133), 0x80), (_NAN, 0x7F),
        ),
    },
    "partial edge block": {
        # 448: 2^0. Two rows below: amax 1, 2^-8, and -0.5 * 256 = -128 = -2^7 is 0xF0.
        "rows below the last whole block": _placed(
            (130, 40),
            elements={
                (127, 39): Element(448.0, 0x7E), (128, 0): Element(1.0, 0x78),
                (129, 39): Element(-0.5, 0xF0),
            },
            scales={(127, 39): 0x3F80_0000, (128, 0): 0x3B80_0000},
        ),
        # Only zeros below: the inverse is 1. One of 450 above: 2^1, and 225 gives 224.
        "an edge block of zeros": _placed(
            (130, 40), elements={(0, 0): Element(450.0, 0x76), (129, 39): Element(-0.0, 0x80)},
            scales={(0, 0): 0x4000_0000},
        ),
        # 2^-133 below: inverse 2^-127, code of 2^-6. NaN above: amax 0.
        "a subnormal in the last element": _placed(
            (130, 40),
            elements={(127, 0): Element(_NAN, 0x7F), (129, 39): Element(-(2.0**-133), 0x88)},
            scales={(129, 39): 0x0040_0000},
        ),
        # 224 left: 2^-1. Inf right: 1, and 1 is 0x38 there.
        "infinity in the columns beyond the last whole block": _placed(
            (40, 130),
            elements={
                (39, 127): Element(224.0, 0x7E), (0, 128): Element(1.0, 0x38),
                (39, 129): Element(-_INF, 0xFE),
            },
            scales={(39, 127): 0x3F00_0000},
        ),
        # A corner of its own scale: 448 * 2 at the very end, 2^1; the other three are zeros.
        "a corner of two by two": _placed(
            (130, 130),
            elements={(129, 128): Element(896.0, 0x7E), (128, 129): Element(-2.0, 0xB8)},
            scales={(129, 128): 0x4000_0000},
        ),
    },
}

_6, _448, _2688, _INF_BITS = 0x40C0_0000, 0x43E0_0000, 0x4528_0000, 0x7F80_0000
"""fp32 bits of a global amax: 1.5 * 2^2, 1.75 * 2^8, 1.3125 * 2^11, Inf."""
_TOP = (0x7E, (2688.0, 0x7))  # makes S_enc 1; t = 448, and 2688 * fl(1/448) is nearest to 6


def _below_2688(scale, *pairs):
    return _row(_2688, _TOP, (scale, *pairs))


_NVFP4 = {
    "all zeros": {
        # G = 0: S_enc 1, t = 0 and S_dec 0, so the factor is FLT_MAX and not Inf, which gives NaN.
        "zeros everywhere": _full(0.0, 0x0, 0x00, global_amax=0),
    },
    "zero block beside another": {
        "zeros left of 6": _row(_6, (0x00,), (0x7E, (6.0, 0x7))),
        "zeros above 6": _grid({(1, 0): (0x7E, (6.0, 0x7))}, size=(2, 1), global_amax=_6),
        # S_enc is 448. 6: 448. -3: 224 = 1.75 * 2^7, factor 2. 1.5: 112, factor 4. And zeros.
        "four blocks of four scales": _grid(
            {(0, 0): (0x7E, (6.0, 0x7)), (0, 1): (0x76, (-3.0, 0xF)), (1, 0): (0x6E, (1.5, 0x7))},
            size=(2, 2), global_amax=_6,
        ),
    },
    "negative zero": {
        "negative zeros everywhere": _full(-0.0, 0x8, 0x00, global_amax=0),
        "6 among negative zeros": _alone(6.0, 0x7, 0x7E, fill=-0.0, fill_code=0x8, global_amax=_6),
        "zeros of both signs among 6": _full(
            6.0, 0x7, 0x7E, (-0.0, 0x8), (0.0, 0x0), global_amax=_6
        ),
    },
    "rounded to bf16 first": {
        # The global amax is that of the bf16 weights: 449 is a tie and becomes 448.
        "449 is a tie and becomes 448": _alone(449.0, 0x7, 0x7E, global_amax=_448),
        "just above 449 becomes 450": _alone(449 + 2.0**-15, 0x7, 0x7E, global_amax=0x43E1_0000),
        # bf16 has the step 2^-6 here. 2.5 + 2^-7: tie of 2.5 (m = 32, even) and the next; 2.5 is
        # a tie of 2 and 3 again: 2. The next fp32 is above 2.5 in bf16: 3. 3.5 - 2^-7: tie of
        # 3.484375 (m = 95) and 3.5 (m = 96): 3.5, a tie of 3 and 4: 4. The fp32 before gives 3.
        # Without bf16 in between, 2.5 + 2^-7 and 3.5 - 2^-7 would be 3.
        "ties twice, in bf16 and in e2m1": _full(
            6.0, 0x7, 0x7E, (2.5 + 2.0**-7, 0x4), (2.5 + 2.0**-7 + 2.0**-22, 0x5),
            (3.5 - 2.0**-7, 0x6), (3.5 - 2.0**-7 - 2.0**-22, 0x5), (-2.5 - 2.0**-7, 0xC),
            (-3.5 + 2.0**-7, 0xE), global_amax=_6,
        ),
        # 102.25: tie of 102 (m = 76, even) and 102.5; t = 102/6 = 17, a tie of 16 and 18: 16.
        # The next fp32 is 102.5, t = 17.08: 18. 113.75: tie of 113.5 (m = 99) and 114 (m = 100);
        # t = 19, a tie of 18 and 20: 20. The fp32 before is 113.5, t = 18.92: 18.
        # Data are 6.4, 5.7, 5.7 and 6.3, nearest to 6.
        "102.25 is a tie and becomes 102": _below_2688(0x58, (102.25, 0x7)),
        "just above 102.25 becomes 102.5": _below_2688(0x59, (102.25 + 2.0**-17, 0x7)),
        "113.75 is a tie and becomes 114": _below_2688(0x5A, (113.75, 0x7)),
        "just below 113.75 becomes 113.5": _below_2688(0x59, (113.75 - 2.0**-17, 0x7)),
        "2^-134 is a tie and becomes zero": _full(
            0.0, 0x0, 0x00, (2.0**-134, 0x0), (-(2.0**-134), 0x8), (-(2.0**-149), 0x8),
            global_amax=0,
        ),
        # Bits 0x7F7F8000 are midway between 0x7F7F (odd) and Inf: Inf.
        "2^128 - 2^119 is a tie and becomes infinity": _alone(
            Bits(0x7F7F_8000), 0x7, 0x7E, global_amax=_INF_BITS
        ),
        "the largest fp32 becomes infinity": _alone(
            Bits(0xFF7F_FFFF), 0xF, 0x7E, global_amax=_INF_BITS
        ),
        "just below 2^128 - 2^119 stays finite": _alone(
            Bits(0x7F7F_7FFF), 0x7, 0x7E, global_amax=0x7F7F_0000
        ),
    },
    "bf16 subnormals": {
        # S_enc = FLT_MAX, and fl(FLT_MAX * fl(1/6)) is 4/3 * 2^125 within an ulp.
        # 2^-133: t = 4/3 * 2^-8 = 2.67 steps of 2^-9: 3. 1/S_enc = 2^-128 is a subnormal of fp32,
        # 1 / (3 * 2^-137) overflows: the factor is FLT_MAX, and 2^-133 gives 2^-5: zero.
        "the smallest subnormal": _alone(2.0**-133, 0x0, 0x03, global_amax=0x0001_0000),
        "full of the negative smallest subnormal": _full(
            -(2.0**-133), 0x8, 0x03, global_amax=0x0001_0000
        ),
        # 2^-126: t = 0.667 = 10.67 steps of 1/16: 11, that is 1.375 * 2^-1, 0x33. The factor
        # 2^132 / 11 overflows: FLT_MAX, and 2^-126 gives 4.
        "the smallest normal": _alone(2.0**-126, 0x6, 0x33, global_amax=0x0080_0000),
        # 127/128 of that: t = 0.661 = 10.6 steps: 11. Data 3.97: 4.
        "the largest subnormal": _alone(2.0**-126 - 2.0**-133, 0x6, 0x33, global_amax=0x007F_0000),
    },
    "largest finite": {
        # An expert's own largest block has t = 448 within ulps and S_dec 448; its amax gives 6.
        "the largest finite": _alone(_LARGEST, 0x7, 0x7E, global_amax=0x7F7F_0000),
        "the negative largest finite": _alone(-_LARGEST, 0xF, 0x7E, global_amax=0x7F7F_0000),
    },
    "infinity": {
        # S_enc = 1, t = Inf: 448. The factor is fl(1/448), and Inf gives 6.
        "infinity alone": _alone(_INF, 0x7, 0x7E, global_amax=_INF_BITS),
        "negative infinity alone": _alone(-_INF, 0xF, 0x7E, global_amax=_INF_BITS),
        "infinity among negative zeros": _alone(
            _INF, 0x7, 0x7E, fill=-0.0, fill_code=0x8, global_amax=_INF_BITS
        ),
        "infinities and nan": _full(
            _INF, 0x7, 0x7E, (-_INF, 0xF), (_NAN, 0x7), (_NEGATIVE_NAN, 0x7), global_amax=_INF_BITS
        ),
    },
    "nan alone": {
        # Every amax ignores NaN and is 0; NaN is +6 whatever its sign.
        "nan alone": _alone(_NAN, 0x7, 0x00, global_amax=0),
        "negative nan alone": _alone(_NEGATIVE_NAN, 0x7, 0x00, global_amax=0),
        "nan everywhere": _full(_NAN, 0x7, 0x00, global_amax=0),
        "nans below bf16 alone": _full(
            0.0, 0x0, 0x00, *((nan, 0x7) for nan in _LOW_NANS), global_amax=0
        ),
        "a block of nan beside 6": _row(_6, (0x00, (_NEGATIVE_NAN, 0x7)), (0x7E, (6.0, 0x7))),
    },
    "nan beside finite": {
        "nan among 6": _full(
            6.0, 0x7, 0x7E, (_NAN, 0x7), (_NEGATIVE_NAN, 0x7), *((nan, 0x7) for nan in _LOW_NANS),
            global_amax=_6,
        ),
        # -0.5 is an amax of its own here, S_dec 448 and data -6.
        "nan among -0.5": _full(
            -0.5, 0xF, 0x7E, (_NAN, 0x7), (_NEGATIVE_NAN, 0x7), global_amax=0x3F00_0000
        ),
    },
    "amax near a power of two": {
        "one": _alone(1.0, 0x7, 0x7E, global_amax=0x3F80_0000),
        "minus one": _alone(-1.0, 0xF, 0x7E, global_amax=0x3F80_0000),
        "the bf16 above one": _alone(1 + 2.0**-7, 0x7, 0x7E, global_amax=0x3F81_0000),
        "the bf16 below one": _alone(1 - 2.0**-8, 0x7, 0x7E, global_amax=0x3F7F_0000),
        # S_enc = 2688. fl(1/2688) = (1/2688)(1 + 5/32 * 2^-23), times 448 fl((1/6)(1 + ...)) is
        # fl(1/6), and 1 / fl(1/6) = 6 (1 - 2^-25) = 6 - 3/8 ulp: the factor is 6. So 1/8 is 0.75,
        # a tie of 0.5 and 1: 1. 0.375 is 2.25: 2. 0.625 is 3.75: 4. 0.75 is 4.5: 4.
        "fractions of one": _full(
            1.0, 0x7, 0x7E, (0.5, 0x5), (0.25, 0x3), (0.125, 0x2), (-0.125, 0xA), (0.375, 0x4),
            (0.625, 0x6), (-0.75, 0xE), (2.0**-4, 0x1), (2.0**-5, 0x0), (-(2.0**-5), 0x8),
            global_amax=0x3F80_0000,
        ),
        # t = 1/6 = 10.67 steps of 1/64: 11, that is 1.375 * 2^-3, 0x23. Neighbours: 10.75, 10.63.
        # Data 64/11 = 5.8: 6.
        "one in an expert of 2688": _below_2688(0x23, (1.0, 0x7)),
        "the bf16 above one in an expert of 2688": _below_2688(0x23, (1 + 2.0**-7, 0x7)),
        "the bf16 below one in an expert of 2688": _below_2688(0x23, (1 - 2.0**-8, 0x7)),
    },
    "amax near a scale step": {
        # t = 17 is a tie of 16 (0x58) and 18, t = 19 one of 18 (0x59) and 20 (0x5A).
        # Data are 6.4, 6.3, 5.7, 5.7, 6.3 and 5.7, nearest to 6.
        "102 has a tie": _below_2688(0x58, (102.0, 0x7)),
        "the bf16 below 102": _below_2688(0x58, (101.5, 0x7)),
        "the bf16 above 102": _below_2688(0x59, (102.5, 0x7)),
        "minus 114 has a tie": _below_2688(0x5A, (-114.0, 0xF)),
        "the bf16 below 114": _below_2688(0x59, (113.5, 0x7)),
        "the bf16 above 114": _below_2688(0x5A, (114.5, 0x7)),
        # t = 15.5, a tie of 15 (0x57) and 16: 16. Data 93/16 = 5.8.
        "93 has a tie across a power of two": _below_2688(0x58, (93.0, 0x7)),
        # t = 432, a tie of 416 (0x7D) and 448: 448. Below, 429.3: 416, and data 6.19.
        "2592 has a tie at the top": _below_2688(0x7E, (2592.0, 0x7)),
        "the bf16 below 2592": _below_2688(0x7D, (2576.0, 0x7)),
        # t = 1.5 steps of 2^-9: 2, factor 2^8, data 4.5: 4. t = 1 step: factor 2^9, data 6.
        "9 * 2^-9 has a tie of subnormals": _below_2688(0x02, (9 * 2.0**-9, 0x6)),
        "6 * 2^-9 is the smallest scale": _below_2688(0x01, (6 * 2.0**-9, 0x7)),
        # A / G * 448 is 168 in both, the tie of 160 (0x72) and 176; roundings decide. t is
        # A * (S_enc * fl(1/6)), in TE's order.
        # S_enc = fl(2688 * 64/73) = 9652645 * 2^-12, times fl(1/6): 12870194 * 2^-15, times A:
        # fl(168 + 0.77 * 2^-16) is above: 176. With A * S_enc first, or A * fl(1/6), it is 168.
        "219/512 comes out above a tie": _row(
            0x3F92_0000, (0x7E, (73 / 64, 0x7)), (0x73, (219 / 512, 0x7))
        ),
        # S_enc = fl(2688 * 32/37) = 9522204 * 2^-12, times fl(1/6): 12696272 * 2^-15, times A:
        # fl(168 + 0.375 * 2^-16) = 168: 160. With A * S_enc = 1008 + 2^-14 first it is above.
        "111/256 comes out on a tie": _row(
            0x3F94_0000, (0x7E, (37 / 32, 0x7)), (0x72, (111 / 256, 0x7))
        ),
    },
    "saturating": {
        # t = 2.5 steps of 2^-9, a tie of 2 and 3: 2. The factor is 2^8, data 7.5: 6.
        "data beyond 6 below a scale that rounded down": _below_2688(
            0x02, (15 * 2.0**-9, 0x7), (-15 * 2.0**-9, 0xF)
        ),
        # S_enc is about 1.32 * 2^-117: t of 2^100 is about 2^-19, S_dec 0 and the factor FLT_MAX.
        # 2^100 * FLT_MAX = Inf: 6.
        "products that overflow": _row(
            0x7F7F_0000, (0x7E, (_LARGEST, 0x7)),
            (0x00, (2.0**100, 0x7), (-(2.0**100), 0xF), (-0.0, 0x8), (0.0, 0x0)),
        ),
        # S_enc = 1: t saturates at 448, the factor is fl(1/448), and data saturate too.
        "a scale beyond 448": _row(
            _INF_BITS, (0x7E, (_INF, 0x7)), (0x7E, (_LARGEST, 0x7), (-_LARGEST, 0xF), (1.0, 0x0))
        ),
    },
    "ties to even": {
        "ties": _full(
            6.0, 0x7, 0x7E, (0.25, 0x0), (0.75, 0x2), (1.25, 0x2), (1.75, 0x4), (2.5, 0x4),
            (3.5, 0x6), (5.0, 0x6), (-0.75, 0xA), (-1.75, 0xC), (-2.5, 0xC), (-5.0, 0xE),
            global_amax=_6,
        ),
        # t = 0.998: 1. The factor is 1 / fl(1 * fl(1/448)) = 448 (1 - 3/8 * 2^-23), and that is
        # 448 - 2^-15, 0.66 ulp rounded. Times 2^-7 it is just below 3.5: 3, and times 2^-8 just
        # below 1.75: 1.5. S_enc / S_dec = 448 would give the ties, 4 and 2.
        "a factor one ulp below 448": _row(
            _6, (0x7E, (6.0, 0x7)),
            (0x38, (219 * 2.0**-14, 0x7), (2.0**-7, 0x5), (2.0**-8, 0x3), (-(2.0**-8), 0xB)),
        ),
        "bf16 above ties": _full(
            6.0, 0x7, 0x7E, (0.25 + 2.0**-9, 0x1), (0.75 + 2.0**-8, 0x2), (1.25 + 2.0**-7, 0x3),
            (1.75 + 2.0**-7, 0x4), (2.5 + 2.0**-6, 0x5), (3.5 + 2.0**-6, 0x6), (5.0 + 2.0**-5, 0x7),
            global_amax=_6,
        ),
        "bf16 below ties": _full(
            6.0, 0x7, 0x7E, (0.25 - 2.0**-10, 0x0), (0.75 - 2.0**-8, 0x1), (1.25 - 2.0**-7, 0x2),
            (1.75 - 2.0**-7, 0x3), (2.5 - 2.0**-6, 0x4), (3.5 - 2.0**-6, 0x5), (5.0 - 2.0**-5, 0x6),
            global_amax=_6,
        ),
    },
    "rounds to zero": {
        "a quarter and less among 6": _full(
            6.0, 0x7, 0x7E, (0.25, 0x0), (-0.25, 0x8), (2.0**-20, 0x0), (-(2.0**-20), 0x8),
            (2.0**-133, 0x0), (-(2.0**-133), 0x8), global_amax=_6,
        ),
        # The factor is about 2^-125.4: half of the amax gives 3, and -2^-133 is below every fp32.
        "small beside the largest finite": _full(
            _LARGEST, 0x7, 0x7E, (_LARGEST / 2, 0x5), (1.0, 0x0), (-1.0, 0x8), (2.0**-133, 0x0),
            (-(2.0**-133), 0x8), global_amax=0x7F7F_0000,
        ),
    },
    "block far below the expert": {
        # t = half a step of 2^-9, a tie with 0: S_dec 0, the factor FLT_MAX, data 6.
        "3 * 2^-9 has a tie with zero": _below_2688(
            0x00, (3 * 2.0**-9, 0x7), (-3 * 2.0**-9, 0xF), (-0.0, 0x8)
        ),
        "the bf16 below 3 * 2^-9": _below_2688(0x00, ((3 - 2.0**-6) * 2.0**-9, 0x7)),
        # t = 0.503 steps: 1. The factor is 2^9, data 3.02: 3.
        "the bf16 above 3 * 2^-9": _below_2688(0x01, ((3 + 2.0**-6) * 2.0**-9, 0x5)),
        "2^-20 beside 6": _row(_6, (0x7E, (6.0, 0x7)), (0x00, (-(2.0**-20), 0xF), (2.0**-30, 0x7))),
        # FLT_MAX = 2^128 (1 - 2^-24), so that k * 2^-128 gives just below k: ties become the
        # smaller, 0.75 -> 0.5 (not 1), 1.75 -> 1.5 (not 2), 3.5 -> 3 (not 4). 0.5 stays, 0.25 and
        # 2^-5 are zero, 5.125 is 6. A factor of Inf would make 6 of them all, 2^127 other codes.
        "data times the largest fp32": _below_2688(
            0x00, (2.0**-133, 0x0), (-(2.0**-133), 0x8), (2.0**-130, 0x0), (2.0**-129, 0x1),
            (3 * 2.0**-130, 0x1), (5 * 2.0**-130, 0x2), (-7 * 2.0**-130, 0xB), (5 * 2.0**-129, 0x4),
            (7 * 2.0**-129, 0x5), (-5 * 2.0**-128, 0xE), (41 * 2.0**-131, 0x7),
        ),
    },
    "subnormal global amax": {
        # As for bf16 subnormals. 2^-132: t = 4/3 * 2^-7 = 5.33 steps: 5. 2^-132 * FLT_MAX: 2^-4.
        "3 * 2^-134 is a tie and becomes 2^-132": _alone(
            3 * 2.0**-134, 0x0, 0x05, global_amax=0x0002_0000
        ),
        # S_enc stays FLT_MAX below 2^-116.6: a block's scale depends on its own amax only.
        # 2^-126: 0x33, data 4. 2^-133: 0x03, data 2^-5. And zeros.
        "blocks of 2^-126, 2^-133 and zeros": _row(
            0x0080_0000, (0x33, (-(2.0**-126), 0xE), (2.0**-129, 0x1), (3 * 2.0**-130, 0x1)),
            (0x03, (-(2.0**-133), 0x8)), (0x00,),
        ),
        # 1.5 * 2^-126: t = 1 within an ulp, 0x38; 1 / 2^-128 overflows: FLT_MAX, data 6.
        "1.5 * 2^-126": _alone(1.5 * 2.0**-126, 0x7, 0x38, global_amax=0x00C0_0000),
        # 2688 * 2^117 overflows: FLT_MAX. t = 4/3 * 2^8 = 10.67 steps of 32: 352 = 1.375 * 2^8,
        # 0x7B. The factor is 2^128 / 352, data 2^11 / 352 = 5.8: 6.
        "2^-117 whose S_enc overflows": _alone(2.0**-117, 0x7, 0x7B, global_amax=0x0500_0000),
        # S_enc = 2^128 overflows: FLT_MAX. t = 448 - 1 ulp: 448. Data 6 within an ulp.
        "2688 * 2^-128 whose S_enc overflows": _alone(
            2688 * 2.0**-128, 0x7, 0x7E, global_amax=0x0528_0000
        ),
        "2688 * 2^-127 whose S_enc is 2^127": _alone(
            2688 * 2.0**-127, 0x7, 0x7E, global_amax=0x05A8_0000
        ),
    },
    "infinite global amax": {
        # S_enc = 1, S_dec = 448, factor fl(1/448) = (1/448)(1 + 3/8 ulp). 448 k gives k (1 + ...),
        # where 3/8 ulp rounds away for 0.25, 2.5 and 5, ties: 0, 2 and 4. 3.5 is one ulp more: 4.
        "finite among infinity": _full(
            _INF, 0x7, 0x7E, (448.0, 0x2), (112.0, 0x0), (-112.0, 0x8), (1120.0, 0x4),
            (-1568.0, 0xE), (2240.0, 0x6), (2688.0, 0x7), (1.0, 0x0), (-1.0, 0x8), (_NAN, 0x7),
            (-_INF, 0xF), global_amax=_INF_BITS,
        ),
        # S_enc = 1. 6: t = 6 * fl(1/6) = 1, 0x38, data are the weights. 2688: 448. 2^-20: S_dec 0.
        "finite blocks of an expert with infinity": _row(
            _INF_BITS, (0x7E, (-_INF, 0xF)), (0x38, (6.0, 0x7), (-2.5, 0xC), (1.0, 0x2)), _TOP,
            (0x00, (2.0**-20, 0x7)), (0x00,),
        ),
    },
}

_ONE = 0x3F80_0000
_FP8_BLOCK_FP32 = {  # factor fl(448 / amax); an amax of 448 * 2^k gives a power of two, as above
    "all zeros": _E4M3["all zeros"],
    "zero block beside another": {
        # 1: factor 448, so that 1 is 0x7E; its inverse is fl(1/448) = fl(1/7) * 2^-6.
        "four blocks of four scales": _grid(
            {
                (0, 0): (_ONE, (448.0, 0x7E)), (0, 1): (0x4000_0000, (-896.0, 0xFE)),
                (1, 0): (0x3B12_4925, (1.0, 0x7E)),
            },
            size=(2, 2),
        ),
    },
    "negative zero": _E4M3["negative zero"],
    "rounded to bf16 first": {
        # Midway between 448 (even) and 450: 448, and the inverse is 1.
        "449 is a tie and becomes 448": _alone(449.0, 0x7E, _ONE),
        "ties twice, in bf16 and in e4m3":
            _E4M3["rounded to bf16 first"]["ties twice, in bf16 and in e4m3"],
    },
    "bf16 subnormals": {
        # 448 / amax overflows: the largest bf16, 2^128 (1 - 2^-8). Its inverse is 2^-128 * 256/255,
        # 2105376.1 = 0x202020 steps of 2^-149. 2^-133 is nearest to 2^-5, 0x10, and 2^-126 to 4.
        "the smallest subnormal": _alone(2.0**-133, 0x10, 0x0020_2020),
        "the smallest normal": _alone(2.0**-126, 0x48, 0x0020_2020),
    },
    "largest finite": {
        # 255 * 2^120: fl(448/255) = 14737633 * 2^-23, 0.12 ulp above; 2^47 / 14737633 is
        # 9549531.35: 9549531 = 0x91B6DB, times 2^-24 * 2^120. Data 448 within an ulp.
        "the largest finite": _alone(_LARGEST, 0x7E, 0x7B11_B6DB),
    },
    "infinity": _E4M3["infinity"],
    "nan alone": _E4M3["nan alone"],
    "nan beside finite": {"nan among 448": _E4M3["nan beside finite"]["nan among 448"]},
    "amax near a power of two": {
        "one": _alone(1.0, 0x7E, 0x3B12_4925),
        "minus one": _alone(-1.0, 0xFE, 0x3B12_4925),
        # 0.5 is 224 = 1.75 * 2^7, -0.25 is -112, 2^-7 is 3.5 = 1.75 * 2^1.
        "fractions of one": _full(
            1.0, 0x7E, 0x3B12_4925, (0.5, 0x76), (-0.25, 0xEE), (2.0**-7, 0x46),
        ),
    },
    "amax near a scale step": {
        "448": _alone(448.0, 0x7E, _ONE),
        "224": _alone(224.0, 0x7E, 0x3F00_0000),
        # fl(448/450) = 16702651 * 2^-24, 0.40 ulp above; 2^47 / 16702651 is 8426056.94:
        # 8426057 = 0x809249.
        "the bf16 above 448": _alone(450.0, 0x7E, 0x3F80_9249),
    },
    "saturating": {"finite among infinity": _FP8_BLOCK["saturating"]["finite among infinity"]},
    "ties to even": {
        "ties of normal codes": _E4M3["ties to even"]["ties of normal codes"],
        "ties of subnormal codes": _E4M3["ties to even"]["ties of subnormal codes"],
    },
    "rounds to zero": {
        "below half a step among 448": _E4M3["rounds to zero"]["below half a step among 448"],
    },
    "partial edge block": {
        # 448: 1. Two rows below: amax 1, 448, and -0.5 * 448 = -224 = -1.75 * 2^7 is 0xF6.
        "rows below the last whole block": _placed(
            (130, 40),
            elements={
                (127, 39): Element(448.0, 0x7E), (128, 0): Element(1.0, 0x7E),
                (129, 39): Element(-0.5, 0xF6),
            },
            scales={(127, 39): _ONE, (128, 0): 0x3B12_4925},
        ),
    },
}

_MXFP4 = {
    "all zeros": {"zeros everywhere": _full(0.0, 0x0, 0x00)},
    "zero block beside another": {
        # 6: 2^0. -12 = -6 * 2: 2^1. 1: v = 4/3 * 2^-3, 2^-2, and 4 is 0x6. And zeros.
        "four blocks of four scales": _grid(
            {(0, 0): (0x7F, (6.0, 0x7)), (0, 1): (0x80, (-12.0, 0xF)), (1, 0): (0x7D, (1.0, 0x6))},
            size=(2, 2),
        ),
    },
    "negative zero": {
        "negative zeros everywhere": _full(-0.0, 0x8, 0x00),
        "6 among negative zeros": _alone(6.0, 0x7, 0x7F, fill=-0.0, fill_code=0x8),
        "zeros of both signs among 6": _full(6.0, 0x7, 0x7F, (-0.0, 0x8), (0.0, 0x0)),
    },
    "rounded to bf16 first": {
        # bf16 has the step 2^-5 here: midway between 6 (m = 64, even) and the next, and above it.
        # Above, v > 1: 2^1, and 3.016 is nearest to 3: 0x5.
        "6 + 2^-6 is a tie and becomes 6": _alone(6 + 2.0**-6, 0x7, 0x7F),
        "just above 6 + 2^-6 becomes 6 + 2^-5": _alone(6 + 2.0**-6 + 2.0**-21, 0x5, 0x80),
        # As for nvfp4.
        "ties twice, in bf16 and in e2m1": _full(
            6.0, 0x7, 0x7F, (2.5 + 2.0**-7, 0x4), (2.5 + 2.0**-7 + 2.0**-22, 0x5),
            (3.5 - 2.0**-7, 0x6), (3.5 - 2.0**-7 - 2.0**-22, 0x5), (-2.5 - 2.0**-7, 0xC),
            (-3.5 + 2.0**-7, 0xE),
        ),
        "2^-134 is a tie and becomes zero": _full(
            0.0, 0x0, 0x00, (2.0**-134, 0x0), (-(2.0**-134), 0x8), (-(2.0**-149), 0x8)
        ),
    },
    "bf16 subnormals": {
        # v is below 2^-127: byte 0x00, factor 2^127. 2^-6 is zero, 2 is 0x4, 1.984 too.
        "the smallest subnormal": _alone(2.0**-133, 0x0, 0x00),
        "the largest subnormal": _alone(2.0**-126 - 2.0**-133, 0x4, 0x00),
        "the smallest normal": _alone(-(2.0**-126), 0xC, 0x00),
    },
    "largest finite": {
        # v = 1.9921875 / 1.5 * 2^125 = 1.33 * 2^125: 253 = 0xFD, 2^126. 3.98 is nearest to 4.
        "the largest finite": _alone(_LARGEST, 0x6, 0xFD),
        "the negative largest finite": _alone(-_LARGEST, 0xE, 0xFD),
    },
    "infinity": {
        "infinity alone": _alone(_INF, 0x7, 0xFE),
        "infinities and nan": _full(
            _INF, 0x7, 0xFE, (-_INF, 0xF), (_NAN, 0x7), (_NEGATIVE_NAN, 0x7)
        ),
    },
    "nan alone": {
        "negative nan alone": _alone(_NEGATIVE_NAN, 0x7, 0x00),
        "nan everywhere": _full(_NAN, 0x7, 0x00),
        "nans below bf16 alone": _full(0.0, 0x0, 0x00, *((nan, 0x7) for nan in _LOW_NANS)),
    },
    "nan beside finite": {
        "nan among -6": _full(
            -6.0, 0xF, 0x7F, (_NAN, 0x7), (_NEGATIVE_NAN, 0x7), *((nan, 0x7) for nan in _LOW_NANS)
        ),
    },
    "amax near a power of two": {
        # v = 4/3 * 2^-3: 2^-2. 4.03 and 3.98 are nearest to 4.
        "one": _alone(1.0, 0x6, 0x7D),
        "the bf16 above one": _alone(1 + 2.0**-7, 0x6, 0x7D),
        "the bf16 below one": _alone(1 - 2.0**-8, 0x6, 0x7D),
    },
    "amax near a scale step": {
        # v = fl(1 + 1/4 ulp) = 1: 2^0. Above, v > 1: 2^1, and 3.016 gives 3.
        "6": _alone(6.0, 0x7, 0x7F),
        "the bf16 below 6": _alone(6 - 2.0**-5, 0x7, 0x7F),
        "the bf16 above 6": _alone(6 + 2.0**-5, 0x5, 0x80),
        "minus 3": _alone(-3.0, 0xF, 0x7E),
        # v = 2^-126 and 2^-127, the last of byte 0x00.
        "6 * 2^-126": _alone(6 * 2.0**-126, 0x7, 0x01),
        "6 * 2^-127": _alone(6 * 2.0**-127, 0x7, 0x00),
        "the bf16 above 6 * 2^-127": _alone((6 + 2.0**-5) * 2.0**-127, 0x5, 0x01),
    },
    "saturating": {
        # The factor is 2^-127: only Inf saturates. 1.992 gives 2, 2^127 is 1, 2^125 half a step,
        # 3 * 2^125 one and a half.
        "finite among infinity": _full(
            _INF, 0x7, 0xFE, (-_INF, 0xF), (_LARGEST, 0x4), (-_LARGEST, 0xC), (2.0**127, 0x2),
            (2.0**126, 0x1), (2.0**125, 0x0), (3 * 2.0**125, 0x2), (1.0, 0x0), (-1.0, 0x8),
        ),
    },
    "ties to even": {
        "ties": _full(
            6.0, 0x7, 0x7F, (0.25, 0x0), (0.75, 0x2), (1.25, 0x2), (1.75, 0x4), (2.5, 0x4),
            (3.5, 0x6), (5.0, 0x6), (-0.75, 0xA), (-1.75, 0xC), (-2.5, 0xC), (-5.0, 0xE),
        ),
        # The factor is 4.
        "ties below an amax of one": _full(
            1.0, 0x6, 0x7D, (2.0**-4, 0x0), (3 * 2.0**-4, 0x2), (-5 * 2.0**-4, 0xA),
            (7 * 2.0**-4, 0x4), (-5 * 2.0**-3, 0xC), (7 * 2.0**-3, 0x6),
        ),
    },
    "rounds to zero": {
        "a quarter and less among 6": _full(
            6.0, 0x7, 0x7F, (0.25, 0x0), (-0.25, 0x8), (2.0**-20, 0x0), (-(2.0**-133), 0x8)
        ),
    },
}

_INT4 = {
    "all zeros": {"zeros everywhere": _full(0.0, 0x8, 0x3728)},
    "zero block beside another": {
        # 7: 1. -14: 2. 1: fl(1/7) = 0x3E124925, bf16 0x3E12, and 1 is 7 steps. And zeros.
        "four blocks of four scales": _grid(
            {
                (0, 0): (0x3F80, (7.0, 0xF)), (0, 1): (0x4000, (-14.0, 0x1)),
                (1, 0): (0x3E12, (1.0, 0xF)),
            },
            size=(2, 2),
        ),
    },
    "negative zero": {
        "negative zeros everywhere": _full(-0.0, 0x8, 0x3728),
        "zeros of both signs among 7": _full(7.0, 0xF, 0x3F80, (-0.0, 0x8), (0.0, 0x8)),
    },
    "rounded to bf16 first": {
        # bf16 has the step 2^-5 here: midway between 7 (m = 96, even) and the next, and above it:
        # s = 1.00446, 0.57 steps of bf16 above 1: 0x3F81.
        "7 + 2^-6 is a tie and becomes 7": _alone(7 + 2.0**-6, 0xF, 0x3F80),
        "just above 7 + 2^-6 becomes 7 + 2^-5": _alone(7 + 2.0**-6 + 2.0**-21, 0xF, 0x3F81),
        # 2.5 + 2^-7: tie of 2.5 (m = 32) and the next; 2.5 is a tie again: 2. The next fp32: 3.
        "ties twice, in bf16 and in int4": _full(
            7.0, 0xF, 0x3F80, (2.5 + 2.0**-7, 0xA), (2.5 + 2.0**-7 + 2.0**-22, 0xB),
            (-2.5 - 2.0**-7, 0x6), (-2.5 - 2.0**-7 - 2.0**-22, 0x5),
        ),
    },
    "bf16 subnormals": {
        "the smallest subnormal": _alone(2.0**-133, 0x8, 0x3728),
        "the smallest normal": _alone(-(2.0**-126), 0x8, 0x3728),
    },
    "largest finite": {
        # s = 255/224 * 2^125 within an ulp: 17.7 steps of bf16 above 2^125: 0x7E12.
        "the largest finite": _alone(_LARGEST, 0xF, 0x7E12),
        "the negative largest finite": _alone(-_LARGEST, 0x1, 0x7E12),
    },
    "infinity": {
        # s = Inf: Inf / Inf is NaN, of either sign, and all that is finite is 0.
        "infinity alone": _alone(_INF, 0xF, 0x7F80),
        "negative infinity alone": _alone(-_INF, 0xF, 0x7F80),
        "finite among infinity": _full(
            _INF, 0xF, 0x7F80, (-_INF, 0xF), (_LARGEST, 0x8), (-1.0, 0x8), (_NAN, 0xF)
        ),
    },
    "nan alone": {
        "negative nan alone": _alone(_NEGATIVE_NAN, 0xF, 0x3728),
        "nan everywhere": _full(_NAN, 0xF, 0x3728),
        "nans below bf16 alone": _full(0.0, 0x8, 0x3728, *((nan, 0xF) for nan in _LOW_NANS)),
    },
    "nan beside finite": {
        "nan among -7": _full(
            -7.0, 0x1, 0x3F80, (_NAN, 0xF), (_NEGATIVE_NAN, 0xF),
            *((nan, 0xF) for nan in _LOW_NANS),
        ),
    },
    "amax near a power of two": {
        # s is 8/7 * 2^-3 within an ulp, 18.3 steps of bf16 above 2^-3: 0x3E12. Its neighbours have
        # 19.4 and 17.7.
        "one": _alone(1.0, 0xF, 0x3E12),
        "the bf16 above one": _alone(1 + 2.0**-7, 0xF, 0x3E13),
        "the bf16 below one": _alone(-(1 - 2.0**-8), 0x1, 0x3E12),
    },
    "amax near a scale step": {
        # 147 * 2^-21 / 7 = 21 * 2^-21 is 1.0014e-5: 0x3728 as well, and 7 steps. The bf16 below
        # has 9.9454e-6 and thus s = 1e-5: 6.96 steps. 1e-5 is one step, 5e-6 half a step.
        "147 * 2^-21": _alone(147 * 2.0**-21, 0xF, 0x3728),
        "the bf16 below 147 * 2^-21": _alone(146 * 2.0**-21, 0xF, 0x3728),
        "2^-17 in steps of 1e-5": _alone(2.0**-17, 0x9, 0x3728),
        "2^-18 in steps of 1e-5": _alone(-(2.0**-18), 0x8, 0x3728),
    },
    "ties to even": {
        "ties": _full(
            7.0, 0xF, 0x3F80, (0.5, 0x8), (-0.5, 0x8), (1.5, 0xA), (2.5, 0xA), (3.5, 0xC),
            (4.5, 0xC), (5.5, 0xE), (6.5, 0xE), (-1.5, 0x6), (-2.5, 0x6), (-6.5, 0x2),
        ),
        "bf16 beside ties": _full(
            7.0, 0xF, 0x3F80, (0.5 + 2.0**-8, 0x9), (0.5 - 2.0**-9, 0x8), (2.5 + 2.0**-6, 0xB),
            (1.5 - 2.0**-7, 0x9), (-6.5 - 2.0**-5, 0x1),
        ),
        # s = fl(1/7) is above 1/7: 0.5 is below 3.5 steps, though fl(0.5 * 7) is a tie.
        "a step above a seventh": _full(1.0, 0xF, 0x3E12, (0.5, 0xB), (0.25, 0xA), (-0.75, 0x3)),
    },
    "rounds to zero": {
        "half a step and less among 7": _full(
            7.0, 0xF, 0x3F80, (0.5, 0x8), (-0.5, 0x8), (2.0**-20, 0x8), (-(2.0**-133), 0x8)
        ),
    },
}
# fmt: on

_TABLES = {
    "mxfp8": (_E4M3, _E8M0, _MXFP8_1D),
    "mxfp8_2d": (_E4M3, _E8M0),
    "nvfp4": (_NVFP4,),
    "fp8_block": (_E4M3, _FP8_BLOCK),
    "fp8_block_fp32": (_FP8_BLOCK_FP32,),
    "mxfp8_rows": (_E4M3, _E8M0),
    "mxfp4": (_MXFP4,),
    "nvfp4_rows": (_NVFP4,),
    "int4": (_INT4,),
    "int4_g128": (_INT4,),
}

SPECIAL_CASES: Mapping[str, SpecialCase] = MappingProxyType(
    {
        f"{format}: {name}": recipe(f"{format}: {name}", kind, format)
        for format, tables in _TABLES.items()
        for table in tables
        for kind, recipes in table.items()
        for name, recipe in recipes.items()
    }
)
"""Every special case by name, the format first."""
