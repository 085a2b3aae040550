"""Health figures of quantized experts, and the sums that they are computed from.

A pass over masters and weights computes sums, which are added over the shards of a weight, and an
amax, of which the maximum is taken. Figures are computed from complete sums, on the host.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType

import torch
from torch import Tensor

SKETCH = 32
"""Entries of the sketch of an expert."""

TAGS = "moe_optim/"
"""Prefix of figures in the logs of a run: ``moe_optim/layers.3.fc1/saturated``."""


class Sum(IntEnum):
    """Columns of the sums of an expert; its sketch follows them. Counts are exact in fp64."""

    SQUARES = 0
    """Squares of the weights, which are rounded to bf16 here and below."""
    ERRORS = 1
    """Squares of value - weight."""
    ELEMENTS = 2
    """Number of weights."""
    SATURATED = 3
    """Weights above the largest magnitude that their block holds, which are read as that."""
    FLUSHED = 4
    """Weights other than zero that are read as zero."""
    BLOCKS = 5
    """Rowwise blocks; of a shard those whose first element it has."""
    DEAD = 6
    """Blocks all of whose elements are read as zero."""


NUM_SUMS = len(Sum) + SKETCH
"""Columns of the sums of an expert."""

THRESHOLDS: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "e4m3": {"saturated": 0.001, "flushed": 0.05, "error": 0.05, "dead_blocks": 0.01},
        "e2m1": {"saturated": 0.02, "flushed": 0.3, "error": 0.2, "dead_blocks": 0.01},
    }
)
"""By element: larger figures cause a warning. Normal weights stay at half or below."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerHealth:
    """The figures of one linear of one layer; tensors have an entry an expert, fp64."""

    layer: str
    """Such as ``layers.3.fc1``."""
    element: str
    """Element of the storage format: ``e4m3`` or ``e2m1``."""
    experts: tuple[int, ...]
    """Numbers among all experts of the layer."""
    amax: Tensor
    """Largest magnitude; NaN does not count."""
    sums: Tensor
    """[experts, NUM_SUMS], complete."""

    @property
    def norm(self) -> Tensor:
        """Root of the sum of squares."""
        return self.sums[:, Sum.SQUARES].sqrt()

    def of_experts(self) -> dict[str, Tensor]:
        """Return name -> a figure of each expert, [E] fp64 on the host.

        ``amax`` and ``norm``; ``saturated`` and ``flushed``, shares of the weights; ``error``,
        relative to the norm; ``dead_blocks``, a share of the blocks. NaN where there is nothing to
        divide by.
        """
        return {"amax": self.amax, "norm": self.norm, **_shares(self.sums)}

    def of_layer(self) -> dict[str, float]:
        """Return name -> a figure of all experts together."""
        together = {name: float(of) for name, of in _shares(self.sums.sum(0)).items()}
        figures = {"amax": float(self.amax.max()), "norm": float(self.norm.square().sum().sqrt())}
        figures |= together
        if len(self.experts) > 1:
            figures["norm_ratio"] = float(self.norm.max() / self.norm.min())
            figures["distance"] = distance_of_experts(self.sums[:, len(Sum) :])
        return figures

    def warnings(self) -> Iterator[str]:
        """Yield a sentence for every figure of an expert that is too large, or not finite."""
        return warn_of(self.layer, self.element, self.experts, self.of_experts())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExpertLoad:
    """Tokens of the experts of one layer between two measurements."""

    layer: str
    """Such as ``layers.3.experts``."""
    experts: tuple[int, ...]
    """Numbers among all experts of the layer."""
    tokens: Tensor
    """[experts] fp64, whole numbers; not all zero."""

    def of_experts(self) -> dict[str, Tensor]:
        """Return ``tokens`` of each expert, [E] fp64 on the host."""
        return {"tokens": self.tokens}

    def of_layer(self) -> dict[str, float]:
        """Return ``imbalance``: the tokens of the busiest expert, divided by the mean."""
        return {"imbalance": float(self.tokens.max() / self.tokens.mean())}


def warn_of(
    layer: str, element: str, experts: Sequence[int], figures: Mapping[str, Tensor]
) -> Iterator[str]:
    """Yield a sentence for every figure of an expert that is too large, or not finite.

    Args:
        layer: such as ``layers.3.fc1``.
        element: element of the storage format, ``e4m3`` or ``e2m1``.
        experts: numbers of those that the figures are of.
        figures: by the names of ``LayerHealth.of_experts``, an entry an expert.
    """
    for name, limit in THRESHOLDS[element].items():
        values = figures[name]
        # of an expert of zeros, an error of 0 / 0 says nothing
        large = (values > limit) | (values.isnan() & (figures["norm"] != 0))
        for index in large.nonzero().view(-1).tolist():
            value = float(values[index])
            yield f"{layer}, expert {experts[index]}: {name} is {value:.4g}, above {limit:g}"


def _shares(sums: Tensor) -> dict[str, Tensor]:
    """Return the figures that are quotients of sums [..., NUM_SUMS]."""
    elements = sums[..., Sum.ELEMENTS]
    return {
        "saturated": sums[..., Sum.SATURATED] / elements,
        "flushed": sums[..., Sum.FLUSHED] / elements,
        "error": (sums[..., Sum.ERRORS] / sums[..., Sum.SQUARES]).sqrt(),
        "dead_blocks": sums[..., Sum.DEAD] / sums[..., Sum.BLOCKS],
    }


def distance_of_experts(sketches: Tensor) -> float:
    """Return one minus the mean cosine between two experts, of their sketches [experts, SKETCH].

    0 where all point the same way, as after upcycling; about 1 where they have nothing in common.
    The cosine of two sketches is that of the experts up to about 1 / sqrt(SKETCH), and errors of
    pairs even out in the mean. NaN where an expert is zero.

    Args:
        sketches: [E, SKETCH] fp64, of two experts or more.
    """
    units = sketches / sketches.square().sum(1, keepdim=True).sqrt()
    count = len(units)
    # sum over pairs of u_i u_j = (|sum of u|^2 - count) / 2
    return 1.0 - float((units.sum(0).square().sum() - count) / (count * (count - 1)))


def signs(start: int, end: int, device: torch.device | str | None = None) -> Tensor:
    """Return the sign, 1 or -1 in fp32, that each element of an expert has in its sketch.

    Two rounds of multiplying and folding make them look random (Knuth's and murmur3's constants);
    they depend on the element's number alone, so that every cut of an expert gives one sketch.

    Args:
        start: first element, counted in the expert.
        end: one past the last.
        device: device of the result.

    Returns:
        [end - start] fp32.
    """
    bits = torch.arange(start, end, device=device) * 0x9E3779B1 & 0xFFFFFFFF
    bits = (bits ^ (bits >> 15)) * 0x85EBCA77 & 0xFFFFFFFF
    return 1.0 - 2.0 * (bits >> 31).float()
