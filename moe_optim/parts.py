"""Quantizing one rank's part of a weight that is cut over a mesh: rows, columns and experts.

Where parts are whole blocks, a part is quantized as the weight that it is, by kernels where these
run. Blocks that several ranks share are encoded in plain torch.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from moe_optim.errors import LayoutError
from moe_optim.formats import QuantizedWeight
from moe_optim.formats.partition import Bounds, Maxima, Partition
from moe_optim.formats.reference import parts as reference
from moe_optim.kernels.member_table import Backend, MemberTable
from moe_optim.kernels.table_entry import TableEntry

ReduceMax = Callable[[Tensor, str], object]
"""Replaces a contiguous fp32 tensor, in place, by its maximum over the ranks of a mesh axis."""


@torch.no_grad()
def quantize_part(
    part: Tensor,
    partition: Partition,
    coordinate: Mapping[str, int],
    reduce_max: ReduceMax | None = None,
    *,
    backend: Backend = "auto",
) -> dict[str, Tensor]:
    """Quantize what this rank has of a weight, as if it had been quantized whole and then cut.

    Every rank of the mesh must call it: ``reduce_max`` is called for the axes of
    ``partition.maxima``, in the same order on all ranks; never if there are none.

    Args:
        part: [E, R, C] fp32 or bf16 of ``partition.part_shape``; left alone.
        partition: of the weight, see ``infer_partition``.
        coordinate: mesh axis -> place of this rank along it.
        reduce_max: called with a tensor and the name of a mesh axis. With a device mesh it is an
            all-reduce with MAX over ``mesh.get_group(axis)``.
        backend: ``auto`` takes kernels where they run, ``reference`` does without.

    Returns:
        The buffers by the fields of ``QuantizedWeight``, each the slice that ``partition.buffers``
        says, on the device of the part; data shared by both directions is one tensor. Where
        ``partition.has_whole_blocks``, they are those of a ``QuantizedWeight``. For bf16: ``data``,
        the values rounded.

    Raises:
        LayoutError: part or coordinate do not fit the partition, or maxima have to be exchanged and
            ``reduce_max`` is not given; before anything is exchanged.
    """
    bounds = partition.bounds(coordinate)
    _check(part, partition, reduce_max)
    if partition.format is None:
        return {"data": part.to(torch.bfloat16, copy=True)}
    exchange = _Exchange(bounds, reduce_max)
    if partition.has_whole_blocks:
        return _quantize_whole(part, partition, exchange, backend)
    return _quantize_cut(part, partition, exchange)


class _Exchange:
    """Brings maxima of one rank's part to those of the ranks that share them."""

    def __init__(self, bounds: Bounds, reduce_max: ReduceMax | None) -> None:
        self.bounds, self._reduce_max = bounds, reduce_max

    def reduce(self, values: Tensor, maxima: Maxima) -> None:
        """Replace values by their maximum over all ranks of the axes, in place."""
        for axis in maxima.axes:
            assert self._reduce_max is not None, "checked where the part is"
            self._reduce_max(values, axis)

    def reduce_blocks(self, values: Tensor, origin: tuple[int, int], maxima: Maxima) -> None:
        """Reduce the blocks that the part touches, in place.

        Args:
            values: [E, n, m] fp32, one a block, from ``origin`` on.
            origin: first row and column, counted in the weight.
            maxima: which of them they are.
        """
        shared = values.new_zeros((values.shape[0], *maxima.shape))
        own, among = [slice(None)], [slice(None)]
        rows, cols = self.bounds["rows"], self.bounds["columns"]
        for span, base, block, extent in zip(
            (rows, cols), origin, maxima.block, maxima.extent, strict=True
        ):
            first, end = span.start // block, -(-span.stop // block)
            own.append(slice(first - base // block, end - base // block))
            base = span.start // extent * extent // block
            among.append(slice(first - base, end - base))
        shared[tuple(among)] = values[tuple(own)]
        self.reduce(shared, maxima)
        values[tuple(own)] = shared[tuple(among)]


def _quantize_whole(
    part: Tensor, partition: Partition, exchange: _Exchange, backend: Backend
) -> dict[str, Tensor]:
    """Quantize a part of whole blocks as a weight, but for the amaxes of its experts."""
    assert partition.format is not None, "bf16 has no blocks"
    target = QuantizedWeight.empty(partition.format, part.shape, device=part.device, name="part")
    entry = TableEntry(
        parameter="part",
        source=part.detach().contiguous(),
        target=target,
        shares_experts=bool(partition.maxima),
    )
    table = MemberTable.build([entry], backend=backend)
    table.find_maxima.launch()
    for maxima in partition.maxima:
        exchange.reduce(table.exchange, maxima)
    table.encode.launch()
    table.finish.launch()
    return {buffer.name: getattr(target, buffer.name) for buffer in partition.buffers}


def _quantize_cut(part: Tensor, partition: Partition, exchange: _Exchange) -> dict[str, Tensor]:
    """Quantize a part of which blocks lie on several ranks, in plain torch."""
    format = partition.format
    assert format is not None, "bf16 has no blocks"
    bounds = exchange.bounds
    start = bounds["rows"].start, bounds["columns"].start
    origin = reference.padded_start(start, format)
    padded = reference.pad_part(part, start, format)
    found = reference.part_maxima(padded, format)
    for maxima in partition.maxima:
        exchange.reduce_blocks(found[maxima.name], origin, maxima)
    whole = reference.encode_padded(padded, format, found)
    inside: Bounds = {
        "experts": range(part.shape[0]),
        "rows": _from(bounds["rows"], origin[0]),
        "columns": _from(bounds["columns"], origin[1]),
    }
    buffers = {
        buffer.name: getattr(whole, buffer.name)[buffer.slices(inside)].contiguous()
        for buffer in partition.buffers
    }
    if format.columnwise_copy == "shared":
        buffers["columnwise_data"] = buffers["rowwise_data"]
    return buffers


def _from(span: range, first: int) -> range:
    return range(span.start - first, span.stop - first)


def _check(part: Tensor, partition: Partition, reduce_max: ReduceMax | None) -> None:
    if tuple(part.shape) != partition.part_shape:
        raise LayoutError(
            f"part: expected {list(partition.part_shape)} of a weight {list(partition.shape)}, got "
            f"{list(part.shape)}. Pass what one rank has of it."
        )
    if part.dtype not in (torch.float32, torch.bfloat16):
        raise LayoutError(f"part: expected fp32 or bf16, got {part.dtype}. Cast it to fp32.")
    axes = dict.fromkeys(axis for maxima in partition.maxima for axis in maxima.axes)
    if axes and reduce_max is None:
        raise LayoutError(
            f"quantize_part: expected reduce_max, for maxima that the ranks of {', '.join(axes)} "
            "share, got None. Pass what reduces a tensor with MAX over a mesh axis."
        )
