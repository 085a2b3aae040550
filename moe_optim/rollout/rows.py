"""Rows of query, key and value, and of gate and up: together as Megatron has them, and apart.

Megatron keeps query, key and value in one tensor, group by group: the queries of a group, then its
key, then its value (Shoeybi et al., Megatron-LM; groups as in Ainslie et al., GQA). Rows of gate
lie before those of up.
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
    """Sizes that tell the rows of query, key and value apart."""

    groups: int
    """Groups of queries that share a key and a value."""
    queries: int
    """Queries of a group."""
    size: int
    """Rows of one head."""

    def split(self, form: Form, values: Tensor) -> list[Tensor]:
        """Return the tensors of transformers in a tensor of Megatron's, views where they can be."""
        if form == "same":
            return [values]
        if form == "gate_up":
            return list(values.chunk(2))
        by_group = values.unflatten(0, (self.groups, -1, self.size))
        query, key, value = by_group[:, :-2], by_group[:, -2], by_group[:, -1]
        return [query.flatten(0, 2), key.flatten(0, 1), value.flatten(0, 1)]

    def hf_shapes(self, pair: NamePair, shape: Sizes) -> tuple[Sizes, ...] | None:
        """Return the shapes that a tensor of Megatron's comes apart into; None if it cannot."""
        if pair.form == "same":
            return (shape,) * len(pair.hf)
        rows = shape[0] if shape else 0
        key = self.groups * self.size
        parts = [rows // 2] * 2 if pair.form == "gate_up" else [self.queries * key, key, key]
        return tuple((part, *shape[1:]) for part in parts) if shape and sum(parts) == rows else None

    def megatron_shape(self, pair: NamePair, shapes: Sequence[Sizes]) -> Sizes | None:
        """Return the shape of what tensors of transformers come to; None if they do not fit."""
        if pair.form == "same":
            return shapes[0] if len(set(shapes)) == 1 else None
        if not all(shapes):
            return None
        whole = (sum(shape[0] for shape in shapes), *shapes[0][1:])
        return whole if self.hf_shapes(pair, whole) == tuple(shapes) else None

    def to_hf(self, pair: NamePair, values: Tensor) -> dict[str, Tensor]:
        """Return the tensors of transformers by name; views but for copies of a whole tensor."""
        if pair.form == "same":
            return {pair.hf[0]: values, **{name: values.clone() for name in pair.hf[1:]}}
        return dict(zip(pair.hf, self.split(pair.form, values), strict=True))

    def to_megatron(self, pair: NamePair, tensors: Sequence[Tensor]) -> Tensor:
        """Return the tensor of Megatron's that those of transformers are, ordered as ``pair.hf``.

        Raises:
            LayoutError: copies of one tensor differ.
        """
        if pair.form == "gate_up":
            return torch.cat(list(tensors))
        if pair.form == "qkv":
            by_group = [part.unflatten(0, (self.groups, -1, self.size)) for part in tensors]
            return torch.cat(by_group, dim=1).flatten(0, 2)
        for name, tensor in zip(pair.hf[1:], tensors[1:], strict=True):
            if not torch.equal(tensor.view(torch.uint8), tensors[0].view(torch.uint8)):
                raise LayoutError(
                    f"{name}: expected the values of {pair.hf[0]}, which Megatron shares with "
                    "layers that predict further tokens, got others. Megatron has no such model."
                )
        return tensors[0]
