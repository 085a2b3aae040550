"""Weights made of random bits and not of random reals, so that counts hold everywhere."""

import torch

INFINITY = 0x7F80
"""Bits of bf16; all smaller ones are the finite magnitudes, in order."""


def spread_blocks(scale):
    return scale.repeat_interleave(16, 1).repeat_interleave(16, 2)


def bf16(bits):
    """Return the bf16 values of non-negative bits of any integer dtype."""
    return bits.to(torch.int16).view(torch.bfloat16)


def with_random_signs(magnitude, generator):
    """Return ``magnitude`` with signs, zeros excepted: not everybody keeps the sign of zero."""
    negative = torch.randint(0, 2, magnitude.shape, generator=generator).bool() & (magnitude > 0)
    return torch.where(negative, -magnitude, magnitude)


def amax_sweep(block, *, step=1, experts=1):
    """Make one block after another whose amaxes are the bf16 magnitudes, infinity included.

    The other elements are up to 24 binades smaller. Returns [E, R, C] bf16 with C of the block.
    An odd ``step`` takes every so many magnitudes, of all mantissas; infinity fills up the experts.
    """
    rows, cols = block
    whole = experts * max(1, 32 // rows)
    count = -(-(INFINITY // step + 2) // whole) * whole
    generator = torch.Generator().manual_seed(0)
    amax = (torch.arange(count) * step).clamp(max=INFINITY)
    below = torch.randint(0, 24 << 7, (count, rows * cols), generator=generator)
    bits = (amax[:, None] - below).clamp(min=0)
    places = torch.arange(count)
    bits[places, places % (rows * cols)] = amax
    return with_random_signs(bf16(bits), generator).view(experts, -1, cols)


def random_weights(binades, *, experts=16, size=256):
    """Make experts of random amaxes out of 16x16 blocks that differ by up to so many binades.

    Returns [E, size, size] bf16, about a million values: random mantissas and signs, exponents up
    to 8 smaller than the block's, one zero in 16.
    """
    generator = torch.Generator().manual_seed(0)

    def integers(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator)

    top = 127 + binades // 2
    blocks = integers(top - binades, top + 1, experts, size // 16, size // 16)
    exponent = spread_blocks(blocks) - integers(0, 9, experts, size, size)
    bits = (exponent << 7) + integers(0, 128, experts, size, size)
    largest = (top << 7) + integers(0, 128, experts, 1, 1)
    bits = torch.minimum(bits, largest)
    bits[integers(0, 16, *bits.shape) == 0] = 0
    return with_random_signs(bf16(bits), generator)


def every_element(amax):
    """Make [1, R, 16] bf16 of all values from -amax to amax, each row beside ``amax`` itself."""
    largest = int(torch.tensor(amax).bfloat16().view(torch.int16))
    magnitudes = bf16(torch.arange(largest + 1))
    values = torch.cat((magnitudes, -magnitudes[1:]))
    rows = -(-values.numel() // 15)
    padded = torch.full((rows + -rows % 32, 16), amax, dtype=torch.bfloat16)
    padded[:rows, 1:] = torch.cat((values, values.new_zeros(rows * 15 - len(values)))).view(-1, 15)
    return padded.unsqueeze(0)
