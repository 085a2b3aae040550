"""The reference gives the hand-derived bytes of every special value, from fp32 and from bf16."""

from collections import Counter
from dataclasses import replace
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


@pytest.mark.parametrize("case", SPECIAL_CASES.values(), ids=lambda case: case.name)
def test_special_values(case):
    for dtype in (torch.float32, torch.bfloat16) if fits_bf16(case) else (torch.float32,):
        assert_special_case(case, quantized(case, dtype))


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_has_all_kinds(format):
    kinds = {case.kind for case in SPECIAL_CASES.values() if case.format == format}
    assert kinds == {kind for kind in get_args(Kind) if format in ONLY_OF.get(kind, FORMATS)}


def test_no_two_cases_of_a_format_have_the_same_weight():
    weights = [
        (case.format, case.shape, special_weight(case).view(torch.int32).numpy().tobytes())
        for case in SPECIAL_CASES.values()
    ]
    assert max(Counter(weights).values()) == 1


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("bit", [0x01, 0x80])
def test_one_flipped_bit_of_any_buffer_is_found(format, bit):
    """Either nibble, either direction, the lowest and the highest bit of a scale."""
    case = SPECIAL_CASES[f"{format}: four blocks of four scales"]
    for field in quantized(case).buffers():
        spoiled = quantized(case)
        buffer = getattr(spoiled, field)
        buffer.view(torch.uint8).view(-1)[-1] ^= bit
        with pytest.raises(AssertionError, match=rf"^{case.name}: (.|\n)*{field} \["):
            assert_special_case(case, spoiled)


MESSAGES = {  # case -> buffer, index of the flipped byte, bits to flip, what is said
    "one element": ("mxfp8: 448", "columnwise_data", (1, 0), 0x01, r"\[1, 0\]: got 0x7F, .* 0x7E"),
    "a nibble": ("nvfp4: one", "rowwise_data", (1, 0), 0x20, r"\[1, 1\]: got 0x2, expected 0x0"),
    "a transposed nibble": (
        "nvfp4: one",
        "columnwise_data",
        (0, 0),
        0x80,
        r"\[1, 0\]: got 0xF, expected 0x7",
    ),
    "a transposed byte": ("fp8_block: one", "columnwise_data", (0, 1), 0x80, r"\[1, 0\]: got 0xF8"),
    "a scale": ("mxfp8_2d: one", "columnwise_scale", (0, 0), 0x01, r"\[0, 0\]: got 0x76, .* 0x77"),
}


@pytest.mark.parametrize(
    ("name", "field", "index", "bits", "message"), MESSAGES.values(), ids=MESSAGES.keys()
)
def test_a_mismatch_names_case_buffer_and_element(name, field, index, bits, message):
    case = SPECIAL_CASES[name]
    spoiled = quantized(case)
    getattr(spoiled, field)[0][index] ^= bits
    with pytest.raises(AssertionError, match=rf"^{name}: mismatches: 1\n  {field} {message}"):
        assert_special_case(case, spoiled)


def test_an_inverse_scale_and_a_global_amax_are_shown_by_their_bits():
    case = SPECIAL_CASES["fp8_block: one"]
    spoiled = quantized(case)
    spoiled.rowwise_scale.mul_(2)
    with pytest.raises(AssertionError, match=r"rowwise_scale \[0, 0\]: got 0x3C000000, .*3B800000"):
        assert_special_case(case, spoiled)
    case = SPECIAL_CASES["nvfp4: one"]
    spoiled = quantized(case)
    spoiled.global_amax.neg_()
    with pytest.raises(AssertionError, match=r"global_amax \[0\]: got 0xBF800000, .*0x3F800000"):
        assert_special_case(case, spoiled)


def test_storage_of_another_format_or_shape_is_refused():
    case = SPECIAL_CASES["mxfp8: one"]
    with pytest.raises(AssertionError, match=r"mxfp8: one: .* mxfp8_2d \[1, 32, 32\]"):
        assert_special_case(case, quantized(replace(case, format="mxfp8_2d")))
    with pytest.raises(AssertionError, match=r"mxfp8: one: .* mxfp8 \[1, 64, 32\]"):
        assert_special_case(case, quantized(replace(case, shape=(64, 32))))
