"""Values on narrow grids and gradients behind them, derived by hand: tables that bind all backends.

A grid of 8 bits and amax 127 has scale 1, so that codes are the values; one of E4M3 and amax 448
has ``fl(fl(1/448) * 448) = 1``. E4M3 has steps of 2 from 16 on, and of 2^-9 below 2^-6.
"""

import math
from typing import NamedTuple

import torch

TINY = 2.0**-24
"""The largest amax that counts as zero."""


class ValueCase(NamedTuple):
    """One weight, and what becomes of it."""

    bits: int | str
    amax: float
    value: float
    result: float
    narrow_range: bool = False


VALUE_CASES = {
    "8 bits, below a tie": ValueCase(8, 127.0, 2.375, 2.0),
    "8 bits, a tie goes to even, down": ValueCase(8, 127.0, 2.5, 2.0),
    "8 bits, a tie goes to even, up": ValueCase(8, 127.0, 3.5, 4.0),
    "8 bits, a negative tie": ValueCase(8, 127.0, -1.5, -2.0),
    "8 bits, zero": ValueCase(8, 127.0, 0.0, 0.0),
    "8 bits, what rounds to zero keeps its sign": ValueCase(8, 127.0, -0.5, -0.0),
    "8 bits, the last code": ValueCase(8, 127.0, 127.0, 127.0),
    "8 bits, beyond the last code": ValueCase(8, 127.0, 200.0, 127.0),
    "8 bits, one code more below": ValueCase(8, 127.0, -128.0, -128.0),
    "8 bits, beyond it": ValueCase(8, 127.0, -200.0, -128.0),
    "8 bits, a narrow range has none": ValueCase(8, 127.0, -200.0, -127.0, narrow_range=True),
    "8 bits, infinity": ValueCase(8, 127.0, math.inf, 127.0),
    "8 bits, minus infinity": ValueCase(8, 127.0, -math.inf, -128.0),
    "8 bits, NaN": ValueCase(8, 127.0, math.nan, math.nan),
    "8 bits, steps of two": ValueCase(8, 254.0, 5.0, 4.0),  # 2.5 steps
    "8 bits, zero amax": ValueCase(8, 0.0, 3.0, 0.0),
    "8 bits, zero amax, negative": ValueCase(8, 0.0, -3.0, -0.0),
    "8 bits, zero amax, infinity": ValueCase(8, 0.0, math.inf, math.nan),  # Inf * 0
    "8 bits, the largest zero amax": ValueCase(8, TINY, 1.0, 0.0),
    "8 bits, an amax just above": ValueCase(8, 2 * TINY, 1.0, 2 * TINY),
    "8 bits, NaN for an amax": ValueCase(8, math.nan, 1.0, math.nan),
    "8 bits, infinity for an amax": ValueCase(8, math.inf, 1.0, math.nan),  # 0 / 0
    "8 bits, a negative amax counts as zero": ValueCase(8, -1.0, 1.0, 0.0),
    "2 bits": ValueCase(2, 1.0, 0.75, 1.0),
    "2 bits, one code more below": ValueCase(2, 1.0, -2.0, -2.0),
    "4 bits": ValueCase(4, 7.0, 6.5, 6.0),
    "16 bits": ValueCase(16, 32767.0, -32768.0, -32768.0),
    "16 bits, nearest": ValueCase(16, 32767.0, 1.5, 2.0),
    "e4m3, a tie goes to even, down": ValueCase("e4m3", 448.0, 17.0, 16.0),
    "e4m3, a tie goes to even, up": ValueCase("e4m3", 448.0, 19.0, 20.0),
    "e4m3, the last code": ValueCase("e4m3", 448.0, 448.0, 448.0),
    "e4m3, beyond the last code": ValueCase("e4m3", 448.0, 512.0, 448.0),
    "e4m3, far below": ValueCase("e4m3", 448.0, -1e6, -448.0),
    "e4m3, infinity": ValueCase("e4m3", 448.0, math.inf, 448.0),
    "e4m3, minus infinity": ValueCase("e4m3", 448.0, -math.inf, -448.0),
    "e4m3, NaN": ValueCase("e4m3", 448.0, math.nan, math.nan),
    "e4m3, the smallest code": ValueCase("e4m3", 448.0, 2.0**-9, 2.0**-9),
    "e4m3, a tie with zero": ValueCase("e4m3", 448.0, 2.0**-10, 0.0),
    "e4m3, what rounds to zero keeps its sign": ValueCase("e4m3", 448.0, -(2.0**-10), -0.0),
    "e4m3, minus zero": ValueCase("e4m3", 448.0, -0.0, -0.0),
    "e4m3, another scale": ValueCase("e4m3", 896.0, 34.0, 32.0),  # a tie of 16 and 18, times two
    "e4m3, zero amax counts as 1": ValueCase("e4m3", 0.0, 0.5, 0.5),  # 224, a code
    "e4m3, zero amax, beyond 1": ValueCase("e4m3", 0.0, 2.0, 1.0),
    "e4m3, the largest zero amax": ValueCase("e4m3", TINY, 0.5, 0.5),
    "e4m3, an amax just above": ValueCase("e4m3", 2 * TINY, 1.0, 2 * TINY),
    "e4m3, NaN for an amax": ValueCase("e4m3", math.nan, 1.0, math.nan),
    "e4m3, infinity for an amax": ValueCase("e4m3", math.inf, 1.0, math.nan),  # 0 / 0
    "e4m3, a negative amax counts as 1": ValueCase("e4m3", -1.0, 0.5, 0.5),
}
"""All values are exact in fp32, bf16 and fp16, but for those beyond the range of fp16."""


class GradientCase(NamedTuple):
    """One weight, and whether the gradient behind it passes."""

    amax: float
    value: float
    passes: bool


_UP = 1 + 2.0**-7  # the next bf16 above 1
GRADIENT_CASES = {
    "inside": GradientCase(1.0, 0.5, passes=True),
    "inside, negative": GradientCase(1.0, -0.5, passes=True),
    "zero": GradientCase(1.0, 0.0, passes=True),
    "on the boundary": GradientCase(1.0, 1.0, passes=True),
    "on the boundary, negative": GradientCase(1.0, -1.0, passes=True),
    "just above": GradientCase(1.0, _UP, passes=False),
    "just below minus the amax": GradientCase(1.0, -_UP, passes=False),
    "far below": GradientCase(1.0, -100.0, passes=False),
    "an amax between two bf16, the lower one": GradientCase(1 + 2.0**-9, 1.0, passes=True),
    "an amax between two bf16, the upper one": GradientCase(1 + 3 * 2.0**-9, _UP, passes=False),
    "zero amax": GradientCase(0.0, 0.5, passes=False),
    "zero amax, a zero": GradientCase(0.0, -0.0, passes=True),
    "an amax that counts as zero": GradientCase(TINY, TINY, passes=True),
    "NaN": GradientCase(1.0, math.nan, passes=False),
    "infinity": GradientCase(1.0, math.inf, passes=False),
    "minus infinity": GradientCase(1.0, -math.inf, passes=False),
    "NaN for an amax": GradientCase(math.nan, 0.5, passes=False),
    "infinity for an amax": GradientCase(math.inf, math.inf, passes=True),
    "a negative amax": GradientCase(-1.0, 0.0, passes=False),
}
GRADIENTS = (3.0, -0.0, math.inf, math.nan)
"""What comes back to each of them: passed on as it is, or zero of no sign."""

GRIDS = {
    "8 bits": {"bits": 8},
    "8 bits, narrow": {"bits": 8, "narrow_range": True},
    "4 bits": {"bits": 4},
    "2 bits": {"bits": 2},
    "16 bits": {"bits": 16},
    "e4m3": {"bits": "e4m3"},
}


def value_tensors(cases, dtype, device="cpu"):
    """Return weights [cases, 1, 1] of one grid, their amaxes and their results."""
    rows = torch.tensor([(case.amax, case.value, case.result) for case in cases]).T
    amax, value, result = (row.to(device).view(-1, 1, 1) for row in rows)
    return value.to(dtype), amax, result.to(dtype)


def by_grid(dtype):
    """Yield the cases that one call can hold: bits, narrow_range, and cases exact in a dtype."""
    largest = torch.finfo(dtype).max
    for key in dict.fromkeys((case.bits, case.narrow_range) for case in VALUE_CASES.values()):
        yield (
            *key,
            [
                case
                for case in VALUE_CASES.values()
                if (case.bits, case.narrow_range) == key
                and (not math.isfinite(case.value) or abs(case.value) <= largest)
            ],
        )


def gradient_tensors(dtype, device="cpu"):
    """Return weights [cases, 1, 4], their amaxes, gradients, and what they become."""
    cases = GRADIENT_CASES.values()
    values = torch.tensor([[[case.value] * len(GRADIENTS)] for case in cases])
    amax = torch.tensor([[[case.amax]] for case in cases])
    gradients = torch.tensor([[GRADIENTS]] * len(cases))
    passes = torch.tensor([[[case.passes]] for case in cases])
    wanted = torch.where(passes, gradients, 0.0)
    return (
        values.to(device, dtype),
        amax.to(device),
        gradients.to(device, dtype),
        wanted.to(device, dtype),
    )
