"""Seeded weights that reach the corners, and storage that shows what was not written."""

import math

import torch

from moe_optim.formats import QuantizedWeight

SENTINEL = 0xA5
"""Fills storage before it is written. No buffer of a test input is full of this byte."""

SPECIAL_BF16 = (0.0, -0.0, math.inf, -math.inf, math.nan, -math.nan, 2.0**-133, -(2.0**-126))


def normal_weights(*shape, seed=0):
    """Normal fp32 values of deviation 0.02, as freshly initialized weights have."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * 0.02


def wide_range_weights(*shape, seed=0, exponents=(-40, 40)):
    """fp32 values whose magnitudes spread over the given powers of two, also within a block.

    Rows differ by large factors and elements by small ones, so that blocks differ in scale and
    hold subnormals; one element in sixteen is a zero of either sign.
    """
    generator = torch.Generator().manual_seed(seed)
    low, high = exponents
    rows = torch.randint(low, high + 1, (*shape[:-1], 1), generator=generator).double()
    elements = torch.randint(-12, 1, shape, generator=generator).double()
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    values = values * torch.exp2(rows + elements)
    zeros = torch.rand(shape, generator=generator) < 1 / 16
    return torch.where(zeros, values * 0, values).float()  # keeps the sign of what becomes zero


def placed(values, dtype, offset, *, line=16):
    """Return a copy some elements behind a multiple of ``line`` bytes, with NaN around it."""
    memory = torch.full((values.numel() + offset + 2 * line,), math.nan, dtype=dtype)
    first = -memory.data_ptr() % line // dtype.itemsize + offset
    return memory[first : first + values.numel()].view(values.shape).copy_(values)


def with_specials(master, *, every=97, specials=SPECIAL_BF16):
    """Return a copy in which every so many elements are special values, in turn."""
    result = master.clone()
    flat = result.view(-1)
    places = torch.arange(0, flat.numel(), every)
    values = torch.tensor(specials, dtype=result.dtype)
    flat[places] = values[torch.arange(len(places)) % len(values)]
    return result


def e4m3_exact_integers(*shape, seed=0):
    """Whole numbers in [-15, 15] times one power of two: nothing rounds in any E4M3 format.

    15 has four significant bits, as E4M3 does; the power of two is the same for a whole expert.
    """
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-20, 21, (shape[0], 1, 1), generator=generator).float()
    values = torch.randint(-15, 16, shape, generator=generator).float()
    return values * torch.exp2(exponents)


def poisoned(format, shape, device="cpu"):
    """Allocate buffers in which every byte is ``SENTINEL``."""
    q = QuantizedWeight.empty(format, shape, device=device)
    for buffer in q.buffers().values():
        buffer.view(torch.uint8).fill_(SENTINEL)
    return q
