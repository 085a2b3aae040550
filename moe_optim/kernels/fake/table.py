"""Device descriptors of one launch over experts that lie anywhere: a function of their addresses.

Nothing else goes into a table, so that none can be out of date: whoever launches asks for that of
the present addresses, and mostly finds one that was built before.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from moe_optim.errors import StateError
from moe_optim.kernels.bound_kernel import is_capturing

SPAN_FIELDS = 4
"""Columns of :attr:`SpanTable.spans`."""

_ALIGNMENT = 16  # bytes of the widest memory access, and elements that make one of any dtype
_KEPT = 4096  # tables of some KiB each: more than launches can be queued before one is let go
_CAPTURED: "set[SpanTable]" = set()
"""What launches of a CUDA graph read at every replay, long after it was last looked up."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SpanTable:
    """What one launch reads and writes: a span of elements an expert. See :func:`find_table`."""

    spans: Tensor
    """[num_experts, 4] int64: the address of the values, that of their gradients or 0, how many
    there are, and the first element of the result, which holds one span after the other."""
    longest: int
    """Elements of the longest span."""
    aligned: bool
    """Whether every span begins and ends at multiples of 16 bytes, and so does its result."""


def find_table(values: Sequence[Tensor], gradients: Sequence[Tensor] = ()) -> SpanTable:
    """Return the table of some experts, built or found.

    Args:
        values: contiguous, of one dtype on one device: [R, C] of one expert each, or [E, R, C].
        gradients: none, or one for each of the values, of the same shape and dtype.

    Raises:
        StateError: a table is missing while a CUDA graph is captured.
    """
    device = values[0].device
    table = _build(
        tuple(one.data_ptr() for one in values),
        tuple(one.data_ptr() for one in gradients),
        tuple((one.shape[0] if one.dim() == 3 else 1, one.numel()) for one in values),
        values[0].element_size(),
        device,
    )
    if is_capturing(device):
        _CAPTURED.add(table)
    return table


@lru_cache(maxsize=_KEPT)
def _build(
    values: tuple[int, ...],
    gradients: tuple[int, ...],
    sizes: tuple[tuple[int, int], ...],
    itemsize: int,
    device: torch.device,
) -> SpanTable:
    """Return the table of some addresses.

    Args:
        values: where tensors begin.
        gradients: where theirs begin, or nothing.
        sizes: experts and elements of each tensor.
        itemsize: bytes of an element.
        device: where the table goes.
    """
    if is_capturing(device):
        raise StateError(
            "fake_quantize: expected experts and gradients where an earlier call found them while "
            "a CUDA graph is captured, got others. Keep them in static memory, and call once "
            "before the capture."
        )
    numels = [total // max(experts, 1) for experts, total in sizes for _ in range(experts)]
    firsts = [0, *accumulate(numels)][:-1]
    rows = zip(
        _addresses(values, sizes, itemsize),
        _addresses(gradients, sizes, itemsize) if gradients else [0] * len(numels),
        numels,
        firsts,
        strict=True,
    )
    spans = torch.tensor([*rows], dtype=torch.int64, device="cpu")
    whole = all(numel % _ALIGNMENT == 0 for numel in numels)
    return SpanTable(
        spans=_carry_over(spans, device),
        longest=max(numels),
        aligned=whole and not any(address % _ALIGNMENT for address in (*values, *gradients)),
    )


def _addresses(
    bases: tuple[int, ...], sizes: tuple[tuple[int, int], ...], itemsize: int
) -> list[int]:
    """Return the address of every expert."""
    return [
        base + expert * (total // experts) * itemsize
        for base, (experts, total) in zip(bases, sizes, strict=True)
        for expert in range(experts)
    ]


def _carry_over(table: Tensor, device: torch.device) -> Tensor:
    """Return a table on its device, ready for launches on any stream.

    A GPU carries it over beside the work that is queued, which nobody waits for.
    """
    if device.type != "cuda":
        return table.to(device)
    stream = _copy_stream(device)
    with torch.cuda.stream(stream):
        carried = table.pin_memory().to(device, non_blocking=True)
    stream.synchronize()
    return carried


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
