"""The rows of Megatron's tensors as transformers has them, and the way back: the same bits.

Megatron keeps query, key and value in one tensor, group by group: the queries of a group, then its
key, then its value (Shoeybi et al., Megatron-LM, and grouped queries as Ainslie et al. define
them). Rows of gate lie before those of up.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_optim.commands.hugging_face.models import Model
from moe_optim.errors import LayoutError
from moe_optim.rollout.families import NamePair

Shape = tuple[int, ...]


def hf_shapes(pair: NamePair, shape: Shape, model: Model) -> tuple[Shape, ...] | None:
    """Return the shapes that a tensor of Megatron's comes apart into; None if it cannot."""
    if pair.form == "same":
        return (shape,) * len(pair.hf)
    parts = _rows(pair, shape[0] if shape else 0, model)
    if not shape or sum(parts) != shape[0]:
        return None
    return tuple((rows, *shape[1:]) for rows in parts)


def megatron_shape(pair: NamePair, shapes: Sequence[Shape], model: Model) -> Shape | None:
    """Return the shape of what tensors of transformers come to; None if they do not fit."""
    if pair.form == "same":
        return shapes[0] if len(set(shapes)) == 1 else None
    if not all(shapes):
        return None
    whole = (sum(shape[0] for shape in shapes), *shapes[0][1:])
    return whole if hf_shapes(pair, whole, model) == tuple(shapes) else None


def to_hf(pair: NamePair, tensor: Tensor, model: Model) -> dict[str, Tensor]:
    """Return the tensors of transformers that one of Megatron's is, by name.

    ``tensor`` has any dtype and the shape that :func:`hf_shapes` takes. What is split is newly
    allocated and contiguous, and so are copies; what is not is ``tensor`` itself.
    """
    if pair.form == "same":
        return {pair.hf[0]: tensor, **{name: tensor.clone() for name in pair.hf[1:]}}
    parts: Sequence[Tensor]
    if pair.form == "qkv":
        groups, queries, width = model.query_groups
        by_group = tensor.reshape(groups, queries + 2, width, *tensor.shape[1:])
        parts = [by_group[:, :queries], by_group[:, queries], by_group[:, queries + 1]]
    else:
        parts = tensor.chunk(2)
    return {
        name: part.reshape(-1, *tensor.shape[1:]).clone()
        for name, part in zip(pair.hf, parts, strict=True)
    }


def to_megatron(pair: NamePair, tensors: Sequence[Tensor], model: Model) -> Tensor:
    """Return the tensor of Megatron's that those of transformers are, in the order of ``pair.hf``.

    They have one dtype, and shapes that :func:`megatron_shape` takes. What is put together is newly
    allocated.

    Raises:
        LayoutError: copies of one tensor differ.
    """
    if pair.form == "same":
        for name, tensor in zip(pair.hf[1:], tensors[1:], strict=True):
            if not torch.equal(tensor.view(torch.uint8), tensors[0].view(torch.uint8)):
                raise LayoutError(
                    f"{name}: expected the values of {pair.hf[0]}, which Megatron shares with "
                    "layers that predict further tokens, got others. Megatron has no such model."
                )
        return tensors[0]
    if pair.form == "qkv":
        groups, _, width = model.query_groups
        by_group = [part.reshape(groups, -1, width, *part.shape[1:]) for part in tensors]
        return torch.cat(by_group, dim=1).flatten(0, 2)
    return torch.cat(list(tensors))


def _rows(pair: NamePair, rows: int, model: Model) -> tuple[int, ...]:
    if pair.form == "gate_up":
        return rows // 2, rows // 2
    groups, queries, width = model.query_groups
    return groups * queries * width, groups * width, groups * width
