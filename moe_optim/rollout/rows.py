"""Splits and joins Megatron's fused rows of query, key and value, and of gate and up.

Megatron stores query, key and value in one tensor by group: queries, then key, then value (Shoeybi
et al., Megatron-LM; groups as in Ainslie et al., GQA). Gate rows precede up rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_optim.errors import LayoutError
from moe_optim.rollout.families import Form, NamePair

Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Heads:
    """Sizes that determine the rows of query, key and value."""

    groups: int
    """Number of query groups, each with one key and value head."""
    queries: int
    """Query heads per group."""
    size: int
    """Rows per head."""

    def split(self, form: Form, values: Tensor) -> list[Tensor]:
        """Split a Megatron tensor into transformers' tensors, views where possible."""
        if form == "same":
            return [values]
        if form == "gate_up":
            return list(values.chunk(2))
        by_group = values.unflatten(0, (self.groups, -1, self.size))
        query, key, value = by_group[:, :-2], by_group[:, -2], by_group[:, -1]
        return [query.flatten(0, 2), key.flatten(0, 1), value.flatten(0, 1)]

    def hf_shapes(self, pair: NamePair, shape: Sizes) -> tuple[Sizes, ...] | None:
        """Return the shapes after splitting a Megatron tensor, None if it cannot be split."""
        if pair.form == "same":
            return (shape,) * len(pair.hf)
        rows = shape[0] if shape else 0
        key = self.groups * self.size
        parts = [rows // 2] * 2 if pair.form == "gate_up" else [self.queries * key, key, key]
        return tuple((part, *shape[1:]) for part in parts) if shape and sum(parts) == rows else None

    def megatron_shape(self, pair: NamePair, shapes: Sequence[Sizes]) -> Sizes | None:
        """Return the shape after joining transformers' tensors, None if they do not fit."""
        if pair.form == "same":
            return shapes[0] if len(set(shapes)) == 1 else None
        if not all(shapes):
            return None
        whole = (sum(shape[0] for shape in shapes), *shapes[0][1:])
        return whole if self.hf_shapes(pair, whole) == tuple(shapes) else None

    def to_hf(self, pair: NamePair, values: Tensor) -> dict[str, Tensor]:
        """Return transformers' tensors by name: views, except for duplicates."""
        if pair.form == "same":
            return {pair.hf[0]: values, **{name: values.clone() for name in pair.hf[1:]}}
        return dict(zip(pair.hf, self.split(pair.form, values), strict=True))

    def to_megatron(self, pair: NamePair, tensors: Sequence[Tensor]) -> Tensor:
        """Join ``tensors``, ordered as ``pair.hf``; LayoutError if copies differ."""
        if pair.form == "gate_up":
            return torch.cat(list(tensors))
        if pair.form == "qkv":
            by_group = [part.unflatten(0, (self.groups, -1, self.size)) for part in tensors]
            return torch.cat(by_group, dim=1).flatten(0, 2)
        for name, tensor in zip(pair.hf[1:], tensors[1:], strict=True):
            if not torch.equal(tensor.view(torch.uint8), tensors[0].view(torch.uint8)):
                raise LayoutError(
                    f"{name}: expected the values of {pair.hf[0]}, which Megatron shares with "
                    "MTP layers, got others. Megatron has no such model."
                )
        return tensors[0]
