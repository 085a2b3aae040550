"""Floors count what has to be read and written, once each."""

from fractions import Fraction

import pytest

from benchmarks.traffic import finish_bytes, requantize_bytes
from moe_optim.commands.plan.costs import step_bytes
from moe_optim.formats import FORMATS, FP8_BLOCK, MXFP8, MXFP8_2D, NVFP4

NUMEL = 128 * 128
FLOORS = {  # bytes of one [128, 128] weight: from fp32, from bf16 that is zeroed, after the gather
    # 4 or 2 + 2 a parameter; two buffers of data, two of one scale a 32. Then scales to and fro.
    "mxfp8": (NUMEL * 6 + 1024, NUMEL * 6 + 1024, 1024 + 1024),
    # One buffer, 16 scales. Then the logical copy, and a scale for each 32 elements, both ways.
    "mxfp8_2d": (NUMEL * 5 + 16, NUMEL * 5 + 16, 16 + 16 + 512 + 512),
    # Sources read twice, half a byte, 64 scales. Then data to and fro, and 128 x 8 scales twice.
    "nvfp4": (NUMEL * 8.5 + 64, NUMEL * 6.5 + 64, NUMEL + 64 + 64 + 1024 + 1024),
    # One buffer, one fp32 scale. Then data to and fro, and that scale three times.
    "fp8_block": (NUMEL * 5 + 4, NUMEL * 5 + 4, 2 * NUMEL + 4 + 3 * 4),
    "fp8_block_fp32": (NUMEL * 5 + 4, NUMEL * 5 + 4, 2 * NUMEL + 4 + 3 * 4),
    # One buffer of rows, one scale a block, of a byte or of two. Nothing follows.
    "mxfp8_rows": (NUMEL * 5 + 512, NUMEL * 5 + 512, 0),
    "mxfp4": (NUMEL * 4.5 + 512, NUMEL * 4.5 + 512, 0),
    "nvfp4_rows": (NUMEL * 8.5 + 1024, NUMEL * 6.5 + 1024, 0),
    "int4": (NUMEL * 4.5 + 1024, NUMEL * 4.5 + 1024, 0),
    "int4_g128": (NUMEL * 4.5 + 256, NUMEL * 4.5 + 256, 0),
}


@pytest.mark.parametrize("name", FORMATS)
def test_floors_count_what_has_to_move(name):
    format = FORMATS[name]
    floors = [requantize_bytes(format, NUMEL, zeroed=zeroed) for zeroed in (False, True)]
    assert (*floors, finish_bytes(format, 128, 128)) == FLOORS[name]


STEPS = {  # format, bytes of a gradient and of both moments -> bytes of a step for each parameter
    "fp32 moments": (MXFP8, 4, 8, 4 + 8 + 16 + Fraction(33, 16)),  # 30.06
    "bf16 moments": (MXFP8, 4, 4, 4 + 8 + 8 + Fraction(33, 16)),
    "bf16 gradients": (MXFP8_2D, 2, 8, 2 + 8 + 16 + 1 + Fraction(1, 1024)),
    "masters once more": (NVFP4, 4, 8, 4 + 12 + 16 + Fraction(1, 2) + Fraction(1, 256)),
    "everything narrow": (FP8_BLOCK, 2, 4, 2 + 8 + 8 + 1 + Fraction(4, 128 * 128)),
}


@pytest.mark.parametrize(("format", "gradient", "moments", "expected"), STEPS.values(), ids=STEPS)
def test_a_step_reads_gradients_and_passes_over_masters_and_moments(
    format, gradient, moments, expected
):
    found = step_bytes(format, NUMEL, grad_bytes=gradient, moment_bytes=moments)
    assert found == NUMEL * expected
