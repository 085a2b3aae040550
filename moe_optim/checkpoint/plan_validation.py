"""Validation of a save plan, in a time that grows with its chunks rather than with their square.

torch 2.11 sorts the chunks of a tensor along its longest axis, and compares each with all that
overlap it there. Of expert weights this is the rows or columns, which most chunks have whole, so it
compares nearly all pairs: 12,288 chunks took 47 s.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations
from math import prod
from operator import add, itemgetter, lt
from typing import Any

from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

logger = logging.getLogger(__name__)

_VALIDATE = "_validate_global_plan"
_FEW = 256
"""Chunks of a tensor that torch may compare."""

type Box = tuple[tuple[int, ...], tuple[int, ...]]
"""First element on each axis, and the one after the last."""


@contextmanager
def validate_quickly() -> Iterator[None]:
    """Validate the plans of saves that begin within this context."""
    stock = getattr(default_planner, _VALIDATE, None)
    if stock is None:  # another version of torch
        yield
        return

    def validate(plans: Any, metadata: Metadata) -> bool:
        found = metadata.state_dict_metadata
        many = {
            key: tensor
            for key, tensor in found.items()
            if isinstance(tensor, TensorStorageMetadata) and len(tensor.chunks) > _FEW
        }
        faulty = [key for key, tensor in many.items() if not is_tiled(tensor)]
        for key in faulty:
            logger.warning("%s: expected chunks that fill it without overlaps, got others", key)
        rest = {key: tensor for key, tensor in found.items() if key not in many}
        return bool(stock(plans, Metadata(rest))) and not faulty

    setattr(default_planner, _VALIDATE, validate)
    try:
        yield
    finally:
        setattr(default_planner, _VALIDATE, stock)


def is_tiled(tensor: TensorStorageMetadata) -> bool:
    """Return whether chunks contain every element of a tensor once."""
    boxes: list[Box] = [
        (tuple(chunk.offsets), tuple(map(add, chunk.offsets, chunk.sizes)))
        for chunk in tensor.chunks
    ]
    is_inside = all(
        0 <= low <= high <= size
        for box in boxes
        for low, high, size in zip(*box, tensor.size, strict=True)
    )
    is_filled = sum(prod(chunk.sizes) for chunk in tensor.chunks) == prod(tensor.size)
    return is_inside and is_filled and not _overlap(boxes)


def _overlap(boxes: list[Box]) -> bool:
    """Return whether any two boxes overlap, cutting them apart along axes as far as possible."""
    left = [boxes]
    while left:
        cluster = left.pop()
        for axis in range(len(cluster[0][0])):
            parts = _cut_apart(cluster, axis)
            if len(parts) > 1:
                left += [part for part in parts if len(part) > 1]
                break
        else:
            for one, other in combinations(cluster, 2):
                if all(map(lt, one[0], other[1])) and all(map(lt, other[0], one[1])):
                    return True
    return False


def _cut_apart(boxes: list[Box], axis: int) -> list[list[Box]]:
    """Return groups of boxes between which no box reaches along an axis."""
    groups: list[list[Box]] = []
    reached = -1
    for box in sorted(boxes, key=lambda box: itemgetter(axis)(box[0])):
        if box[0][axis] >= reached or not groups:
            groups.append([])
        groups[-1].append(box)
        reached = max(reached, box[1][axis])
    return groups
