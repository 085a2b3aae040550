"""One tensor over experts that are parameters of their own: a view, where they lie side by side."""

from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes: what grouped products ask of every stride, and of where a tensor begins


def stack_experts(experts: Sequence[Tensor]) -> Tensor:
    """Return experts as one tensor, without their history.

    Args:
        experts: E contiguous tensors [R, C] of one dtype on one device.

    Returns:
        [E, R, C]: a view where they lie in one memory at equal distances, in order, else a copy.
    """
    return _view(experts) if lie_together(experts) else torch.stack([e.detach() for e in experts])


def lie_together(experts: Sequence[Tensor]) -> bool:
    """Return whether experts can be seen as one tensor without a copy."""
    first, step = experts[0], _distance(experts)
    size = first.element_size()
    end = first.storage_offset() + (len(experts) - 1) * step + first.numel()
    return (
        step >= first.numel()
        and step * size % _ALIGNMENT == 0
        and first.data_ptr() % _ALIGNMENT == 0
        and end * size <= first.untyped_storage().nbytes()
        and all(
            expert.data_ptr() == first.data_ptr() + index * step * size and expert.is_contiguous()
            for index, expert in enumerate(experts)
        )
    )


def _view(experts: Sequence[Tensor]) -> Tensor:
    rows, cols = experts[0].shape
    shape = (len(experts), rows, cols)
    return experts[0].detach().as_strided(shape, (_distance(experts), cols, 1))


def _distance(experts: Sequence[Tensor]) -> int:
    """Return the elements from the first expert to the second; of one alone, those it has."""
    if len(experts) == 1:
        return experts[0].numel()
    return (experts[1].data_ptr() - experts[0].data_ptr()) // experts[0].element_size()
