"""Health figures of quantized experts, and the sums that they are computed from.

Sums add up over the shards of a weight; amaxes combine by MAX. Figures are computed on the host
from complete sums.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType
from typing import TYPE_CHECKING

from moe_optim.formats import FORMATS

if TYPE_CHECKING:  # reports read figures without torch
    import torch
    from torch import Tensor

SKETCH = 32
"""Entries in the sketch of an expert."""

TAGS = "moe_optim/"
"""Prefix of figures in training logs: ``moe_optim/layers.3.fc1/saturated``."""


class Sum(IntEnum):
    """Columns of the sums of an expert, followed by its sketch. Counts are exact in fp64."""

    SQUARES = 0
    """Sum of squared weights, rounded to bf16 here and below."""
    ERRORS = 1
    """Sum of squared differences between quantized value and weight."""
    ELEMENTS = 2
    """Number of weights."""
    SATURATED = 3
    """Number of weights above the largest magnitude of their block, which they saturate to."""
    FLUSHED = 4
    """Number of nonzero weights that dequantize to zero."""
    BLOCKS = 5
    """Number of rowwise blocks; a shard counts blocks whose first element it owns."""
    DEAD = 6
    """Number of blocks that dequantize to all zeros."""


NUM_SUMS = len(Sum) + SKETCH
"""Columns of the sums of an expert."""

_EIGHT_BITS = {"saturated": 0.001, "flushed": 0.05, "error": 0.05, "dead_blocks": 0.01}
_FOUR_BITS = {"saturated": 0.001, "flushed": 0.3, "error": 0.2, "dead_blocks": 0.01}
# E4M3 scales round to nearest: the amax of every second block lies above the largest value
_SATURATED = {"nvfp4": 0.02, "nvfp4_rows": 0.07}

THRESHOLDS: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        name: MappingProxyType(
            (_EIGHT_BITS if format.element_bits == 8 else _FOUR_BITS)
            | ({"saturated": _SATURATED[name]} if name in _SATURATED else {})
        )
        for name, format in FORMATS.items()
    }
)
"""Warning thresholds by format name; figures of normal weights stay below 0.6 of them."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerHealth:
    """Figures of one linear of one layer; tensors have one fp64 entry per expert."""

    layer: str
    """Name such as ``layers.3.fc1``."""
    format: str
    """Name of the storage format."""
    experts: tuple[int, ...]
    """Indices among all experts of the layer."""
    amax: "Tensor"
    """Largest magnitude, [experts] fp64, ignoring NaN."""
    sums: "Tensor"
    """Complete sums, [experts, NUM_SUMS] fp64."""

    @property
    def norm(self) -> "Tensor":
        """L2 norm of each expert."""
        return self.sums[:, Sum.SQUARES].sqrt()

    def of_experts(self) -> "dict[str, Tensor]":
        """Return the figures per expert by name, [E] fp64 on the host.

        ``amax`` and ``norm``; ``saturated`` and ``flushed``, fractions of the weights; ``error``,
        relative to the norm; ``dead_blocks``, a fraction of the blocks. NaN for 0 / 0.
        """
        return {"amax": self.amax, "norm": self.norm, **_shares(self.sums)}

    def of_layer(self) -> dict[str, float]:
        """Return the figures over all experts by name."""
        together = {name: float(of) for name, of in _shares(self.sums.sum(0)).items()}
        figures = {"amax": float(self.amax.max()), "norm": float(self.norm.square().sum().sqrt())}
        figures |= together
        if len(self.experts) > 1:
            figures["norm_ratio"] = float(self.norm.max() / self.norm.min())
            figures["distance"] = distance_of_experts(self.sums[:, len(Sum) :])
        return figures

    def warnings(self) -> Iterator[str]:
        """Yield a sentence for every figure of an expert that is too large or not finite."""
        figures = {name: values.tolist() for name, values in self.of_experts().items()}
        return warn_of(self.layer, self.format, self.experts, figures)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExpertLoad:
    """Token counts of the experts of one layer between two measurements."""

    layer: str
    """Name such as ``layers.3.experts``."""
    experts: tuple[int, ...]
    """Indices among all experts of the layer."""
    tokens: "Tensor"
    """Token counts, [experts] fp64; not all zero."""

    def of_experts(self) -> "dict[str, Tensor]":
        """Return ``tokens`` per expert, [E] fp64 on the host."""
        return {"tokens": self.tokens}

    def of_layer(self) -> dict[str, float]:
        """Return ``imbalance``: the maximum token count divided by the mean."""
        return {"imbalance": float(self.tokens.max() / self.tokens.mean())}


def warn_of(
    layer: str,
    format: str,
    experts: Sequence[int],
    figures: Mapping[str, Sequence[float]],
) -> Iterator[str]:
    """Yield a sentence for every figure of an expert that is too large or not finite.

    Args:
        layer: name such as ``layers.3.fc1``.
        format: name of the storage format.
        experts: indices of the experts that the figures describe.
        figures: figures named as in ``LayerHealth.of_experts``, one entry per expert.
    """
    for name, limit in THRESHOLDS[format].items():
        for index, (value, norm) in enumerate(zip(figures[name], figures["norm"], strict=True)):
            # an all-zero expert has an error of 0 / 0, which is no warning
            if value > limit or (math.isnan(value) and norm != 0):
                yield f"{layer}, expert {experts[index]}: {name} is {value:.4g}, above {limit:g}"


def _shares(sums: "Tensor") -> "dict[str, Tensor]":
    """Return the figures that are ratios of sums [..., NUM_SUMS]."""
    elements = sums[..., Sum.ELEMENTS]
    return {
        "saturated": sums[..., Sum.SATURATED] / elements,
        "flushed": sums[..., Sum.FLUSHED] / elements,
        "error": (sums[..., Sum.ERRORS] / sums[..., Sum.SQUARES]).sqrt(),
        "dead_blocks": sums[..., Sum.DEAD] / sums[..., Sum.BLOCKS],
    }


def distance_of_experts(sketches: "Tensor") -> float:
    """Return one minus the mean pairwise cosine similarity of experts, from their sketches.

    0 if all experts point the same way, as after upcycling; about 1 if they are unrelated. The
    cosine of two sketches approximates that of the experts up to about 1 / sqrt(SKETCH); errors
    average out over pairs. NaN if an expert is zero. ``sketches`` are [E, SKETCH] fp64, E > 1.
    """
    units = sketches / sketches.square().sum(1, keepdim=True).sqrt()
    count = len(units)
    # sum over pairs of u_i u_j = (|sum of u|^2 - count) / 2
    return 1.0 - float((units.sum(0).square().sum() - count) / (count * (count - 1)))


def signs(start: int, end: int, device: "torch.device | str | None" = None) -> "Tensor":
    """Return the signs, 1 or -1, of elements ``start`` to ``end`` of an expert in its sketch.

    A two-round multiplicative hash (constants by Knuth and from murmur3) of the element's index, so
    that the sketch does not depend on how the expert is cut. The result is [end - start] fp32 on
    ``device``.
    """
    import torch

    bits = torch.arange(start, end, device=device) * 0x9E3779B1 & 0xFFFFFFFF
    bits = (bits ^ (bits >> 15)) * 0x85EBCA77 & 0xFFFFFFFF
    return 1.0 - 2.0 * (bits >> 31).float()
