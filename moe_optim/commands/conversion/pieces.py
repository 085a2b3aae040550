"""Pieces in which tensors and experts are read: whole stored chunks, of bounded size together."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from moe_optim.checkpoint.files.reader import TensorInfo
from moe_optim.commands.conversion.layer_view import LayerView
from moe_optim.experts.keys.conversion import convert_expert_set
from moe_optim.experts.keys.layouts import ExpertSet

PIECE_BYTES = 16 * 2**20
"""Size of a piece, unless one stored chunk, or one expert, is larger."""


class Piece(NamedTuple):
    """Values of a tensor from one index of its first axis on."""

    name: str
    of: TensorInfo
    """The whole tensor."""
    first: int
    values: Tensor


def read_experts(view: LayerView, one: ExpertSet, experts: range) -> dict[str, Tensor]:
    """Return some experts of a set, by the keys of a set of these alone, numbered from 0."""
    if len(experts) == one.num_experts:
        return {key: view.read(key) for key in one.keys}
    return {
        key: view.read(one.prefix + pattern.key(), experts)
        if index is None
        else view.read(one.prefix + pattern.key(experts[index]))
        for pattern, index, key in replace(one, num_experts=len(experts)).entries()
    }


def convert_experts(
    tensors: Mapping[str, Tensor],
    experts: range,
    *,
    source: ExpertSet,
    target: ExpertSet,
    rows: tuple[int, int],
) -> dict[str, Tensor]:
    """Return some experts of ``source`` under the keys of ``target``.

    Args:
        tensors: result of :func:`read_experts`.
        experts: numbers of these experts.
        source: set of all experts.
        target: set of all experts in the result.
        rows: GLU interleave of both; 0 puts all gate rows first.
    """
    count = len(experts)
    found = convert_expert_set(
        tensors,
        replace(source, num_experts=count),
        target.layout,
        source_interleave=rows[0] or None,
        target_interleave=rows[1] or None,
    )
    keys = replace(target, prefix=source.prefix, num_experts=count).entries()
    return {
        target.prefix + pattern.key(None if index is None else experts[index]): found[key]
        for pattern, index, key in keys
    }


def ranges_of_experts(sides: Sequence[tuple[LayerView, ExpertSet]], nbytes: int) -> Iterator[range]:
    """Yield ranges of experts that can be read one after the other, on all ``sides``.

    ``nbytes`` is the size of the set.
    """
    count = sides[0][1].num_experts
    cuts: list[Sequence[int]] = [range(count + 1)]
    for view, one in sides:
        for pattern in one.patterns:
            if not pattern.is_per_expert:
                is_first = pattern.stored[0] == "E"  # else experts have no axis of their own
                cuts.append(view.cuts(one.prefix + pattern.key()) if is_first else (0, count))
    return _ranges(cuts, PIECE_BYTES * count // max(1, nbytes))


def ranges_of_rows(views: Iterable[LayerView], key: str, nbytes: int) -> Iterator[range | None]:
    """Yield ranges on the first axis of a tensor of all ``views``; None for one without any."""
    views = list(views)
    shape = views[0].tensors[key].shape
    if not shape or 0 in shape:
        return iter((None,))
    return _ranges([view.cuts(key) for view in views], PIECE_BYTES * shape[0] // max(1, nbytes))


def _ranges(cuts: Iterable[Sequence[int]], most: int) -> Iterator[range]:
    """Yield ranges between common cuts, of ``most`` indices unless a single one has more."""
    found, *others = sorted(cuts, key=len)
    for other in others:
        if other != found:
            kept = other if isinstance(other, range) else set(other)
            found = [cut for cut in found if cut in kept]
    at = 0
    while at < len(found) - 1:
        after = max(at + 1, bisect_right(found, found[at] + most) - 1)
        yield range(found[at], found[after])
        at = after
