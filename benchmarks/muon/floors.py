"""Fewest bytes and operations of the parts of a Muon step, and the speed of a large product."""

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from benchmarks.timing import median_ms

if TYPE_CHECKING:
    from moe_optim.formats import BlockScaledFormat

PRODUCT_SIDE = {"cuda": 8192, "cpu": 512}
_FP32, _BF16 = 4, 2  # bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Measured machine: its speeds in the same run, and how often work is repeated."""

    device: str
    """``cuda`` or ``cpu``."""
    repeats: int
    bytes_per_ms: float
    """Bytes read plus written by a plain copy, per ms."""
    operations_per_ms: float
    """Operations of a large bf16 product, per ms."""


def product_operations_per_ms(device: str) -> float:
    """Return the speed of a product of two large square bf16 matrices of normal values."""
    import torch

    side = PRODUCT_SIDE[device]
    left, right = (torch.randn(side, side, dtype=torch.bfloat16, device=device) for _ in range(2))
    out = torch.empty_like(left)
    (time_ms,) = median_ms([lambda: torch.mm(left, right, out=out)], device)
    return 2 * side**3 / time_ms


def momentum_bytes(numel: int) -> int:
    """Return the bytes of the momentum's update: gradient read, momentum read and written."""
    return numel * 3 * _FP32


def pack_bytes(numel: int) -> int:
    """Return the bytes of packing without Nesterov: momentum read, 16-bit matrices written."""
    return numel * (_FP32 + _BF16)


def update_bytes(format: "BlockScaledFormat | None", numel: int) -> Fraction:
    """Return the bytes of update and encoding.

    16-bit directions are read, masters read and written, and gathered buffers written, bf16 copies
    if ``format`` is None. Masters are read twice if codes depend on an amax of the expert.
    """
    masters = _FP32 * (3 if format is not None and format.has_global_amax else 2)
    encoded = Fraction(_BF16) if format is None else format.gathered_bytes_per_element
    return numel * (_BF16 + masters + encoded)
