"""The reference gives the hand-derived bytes of every special value, from fp32 and from bf16."""

from itertools import product
from typing import get_args

import pytest
import torch

from moe_optim.formats import FORMATS, get_format
from moe_optim.formats.reference import quantize
from tests.support.number_formats.special_values import (
    SPECIAL_CASES,
    Kind,
    assert_special_case,
    fits_bf16,
    special_weight,
)

NVFP4_KINDS = ("block far below the expert", "subnormal global amax", "infinite global amax")
ONLY_OF = {  # kind -> formats that have it; all other kinds are required of every format
    "directions differ": {"mxfp8"},
    "partial edge block": {"fp8_block", "fp8_block_fp32"},
    "saturating": FORMATS.keys() - {"int4", "int4_g128"},  # their amax is seven steps
    **dict.fromkeys(NVFP4_KINDS, {"nvfp4", "nvfp4_rows"}),
}


def quantized(case, dtype=torch.float32):
    return quantize(special_weight(case).to(dtype), get_format(case.format))


@pytest.mark.parametrize("format", FORMATS)
def test_special_values(format):
    """Of all kinds that the format has."""
    cases = [case for case in SPECIAL_CASES.values() if case.format == format]
    for case in cases:
        for dtype in (torch.float32, torch.bfloat16) if fits_bf16(case) else (torch.float32,):
            assert_special_case(case, quantized(case, dtype))
    kinds = {kind for kind in get_args(Kind) if format in ONLY_OF.get(kind, FORMATS)}
    assert {case.kind for case in cases} == kinds


@pytest.mark.parametrize("format", FORMATS)
def test_one_flipped_bit_of_any_buffer_is_found(format):
    """Either nibble, either direction, the lowest and the highest bit of a scale."""
    case = SPECIAL_CASES[f"{format}: four blocks of four scales"]
    for field, bit in product(quantized(case).buffers(), (0x01, 0x80)):
        spoiled = quantized(case)
        buffer = getattr(spoiled, field)
        buffer.view(torch.uint8).view(-1)[-1] ^= bit
        with pytest.raises(AssertionError, match=rf"^{case.name}: (.|\n)*{field} \["):
            assert_special_case(case, spoiled)
