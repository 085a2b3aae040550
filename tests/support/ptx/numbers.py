"""Arithmetic of PTX on numpy arrays, as NVIDIA's PTX ISA 8.8 defines it.

What arithmetic makes NaN is the one canonical NaN. ``.approx`` has no defined bits: it is the exact
result rounded here, so that code with it shows the order of its operations and nothing closer.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[np.generic]

DTYPES = {
    f"{kind}{bits}": np.dtype(f"{numpy}{bits // 8}")
    for bits in (8, 16, 32, 64)
    for kind, numpy in {"s": "i", "u": "u", "b": "u"}.items()
}
DTYPES |= {"f32": np.dtype("f4"), "f64": np.dtype("f8"), "f16": np.dtype("f2")}
_CANONICAL = {np.dtype("f4"): 0x7FFFFFFF, np.dtype("f8"): 0x7FFFFFFFFFFFFFFF}


def canonical(values: Array) -> Array:
    """Return floating-point values with every NaN the canonical one."""
    bits = values.view(f"u{values.itemsize}")
    return np.where(np.isnan(values), bits.dtype.type(_CANONICAL[values.dtype]), bits).view(
        values.dtype
    )


def flush(values: Array) -> Array:
    """Return fp32 values with subnormals as zeros of their signs, which is ``.ftz``."""
    tiny = np.abs(values) < np.float32(2.0**-126)
    return np.where(tiny, np.copysign(np.float32(0), values), values)


def fma(a: Array, b: Array, c: Array) -> Array:
    """Return a * b + c, rounded once; fp64 factors have to be fp32 values, as they are in norms."""
    if a.dtype == np.float64:
        return a * b + c  # the product is exact
    product = a.astype(np.float64) * b.astype(np.float64)  # exact: 48 bits
    addend = c.astype(np.float64)
    total = product + addend
    # what the sum has lost, exactly (Knuth's TwoSum)
    virtual = total - product
    lost = (product - (total - virtual)) + (addend - virtual)
    # rounded to odd in fp64, the cast to fp32 rounds as if it saw all bits (Boldo and Melquiond)
    bits = total.view(np.int64)
    is_even = (bits & 1) == 0
    inexact = np.isfinite(total) & (lost != 0) & is_even
    away = (lost > 0) == (total > 0)
    odd = np.where(inexact, bits + np.where(away, 1, -1), bits)
    return odd.view(np.float64).astype(np.float32)


def largest(a: Array, b: Array) -> Array:
    """Return the maximum; NaN loses against a number, -0 against +0."""
    return _extreme(np.fmax, np.bitwise_and, a, b)


def smallest(a: Array, b: Array) -> Array:
    """Return the minimum; NaN loses against a number, +0 against -0."""
    return _extreme(np.fmin, np.bitwise_or, a, b)


def _extreme(
    choose: Callable[..., Array], of_zeros: Callable[..., Array], a: Array, b: Array
) -> Array:
    bits = f"u{a.itemsize}"
    zeros = of_zeros(a.view(bits), b.view(bits)).view(a.dtype)
    return canonical(np.where((a == 0) & (b == 0), zeros, choose(a, b)))


def to_bf16(values: Array) -> Array:
    """Return the uint16 bits of fp32 values, rounded to the nearest bf16, ties to even."""
    bits = values.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), rounded)


def from_bf16(bits: Array) -> Array:
    """Return the fp32 values of uint16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_e4m3(values: Array) -> Array:
    """Return the uint8 bits of the nearest E4M3, ties to even, saturated; NaN is 0x7F."""
    held = torch.from_numpy(np.clip(values, -448, 448)).to(torch.float8_e4m3fn)
    return np.where(np.isnan(values), np.uint8(0x7F), held.view(torch.uint8).numpy())


def from_e4m3(bits: Array) -> Array:
    """Return the fp16 values of uint8 bits."""
    values = torch.from_numpy(bits.copy()).view(torch.float8_e4m3fn)
    return values.to(torch.float16).numpy()


def shift(op: str, values: Array, amount: Array) -> Array:
    """Return shifted bits; by the width or more, nothing is left but the sign of ``shr.s``."""
    width = 8 * values.itemsize
    by = np.minimum(amount.astype(np.uint32), width - 1).astype(values.dtype)
    shifted = values << by if op == "shl" else values >> by
    gone = (amount >= width) & (op == "shl" or values.dtype.kind == "u")
    return np.where(gone, values.dtype.type(0), shifted)


def bit_field(values: Array, start: Array, length: Array) -> Array:
    """Return ``length`` bits from ``start`` on, of signed values with the sign of the field."""
    wide = np.int64 if values.dtype.kind == "i" else np.uint64
    first, count = start.astype(np.int64), length.astype(np.int64)
    field = values.astype(wide) << (64 - first - count).astype(wide)
    return (field >> (64 - count).astype(wide)).astype(values.dtype)


def permute_bytes(a: Array, b: Array, selectors: Array) -> Array:
    """Return four bytes chosen of the eight of b:a; bit 3 of a selector repeats the byte's sign."""
    both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    result = np.zeros_like(both)
    for place in range(4):
        selector = (selectors.astype(np.uint64) >> np.uint64(4 * place)) & np.uint64(0xF)
        byte = (both >> ((selector & np.uint64(7)) * np.uint64(8))) & np.uint64(0xFF)
        sign = np.where(byte & np.uint64(0x80), np.uint64(0xFF), np.uint64(0))
        byte = np.where(selector & np.uint64(8), sign, byte)
        result |= byte << np.uint64(8 * place)
    return result.astype(np.uint32)


COMPARISONS: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal,
    "ne": lambda a, b: (a != b) & ~_unordered(a, b),
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "num": lambda a, b: ~_unordered(a, b),
    "nan": lambda a, b: _unordered(a, b),
    "equ": lambda a, b: (a == b) | _unordered(a, b),
    "neu": lambda a, b: (a != b) | _unordered(a, b),
    "ltu": lambda a, b: (a < b) | _unordered(a, b),
    "leu": lambda a, b: (a <= b) | _unordered(a, b),
    "gtu": lambda a, b: (a > b) | _unordered(a, b),
    "geu": lambda a, b: (a >= b) | _unordered(a, b),
}
"""By name; of integers none is unordered."""


def _unordered(a: Array, b: Array) -> Array:
    if a.dtype.kind != "f":
        return np.zeros(np.broadcast_shapes(a.shape, b.shape), dtype=bool)
    return np.isnan(a) | np.isnan(b)
