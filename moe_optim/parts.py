"""Quantization of one rank's part of a weight that is cut over a mesh: rows, columns and experts.

A part of whole blocks is quantized like a weight, with kernels where supported. Blocks that span
ranks are encoded in plain torch.
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
"""Function that all-reduces a contiguous fp32 tensor in place with MAX over a mesh axis."""
_Reduce = Callable[[Tensor, Maxima], None]
"""Function that does the same over all axes whose ranks share some maxima."""


@torch.no_grad()
def quantize_part(
    part: Tensor,
    partition: Partition,
    coordinate: Mapping[str, int],
    reduce_max: ReduceMax | None = None,
    *,
    backend: Backend = "auto",
) -> dict[str, Tensor]:
    """Quantize this rank's part of a weight, as if the weight had been quantized and then cut.

    Every rank of the mesh must call it: ``reduce_max`` is called for the axes of
    ``partition.maxima``, if any, in the same order on all ranks.

    Args:
        part: part of the weight, [E, R, C] fp32 or bf16 of ``partition.part_shape``; not modified.
        partition: partition of the weight, see ``infer_partition``.
        coordinate: map from mesh axis to this rank's index along it.
        reduce_max: function of a tensor and the name of a mesh axis. With a device mesh, an
            all-reduce with MAX over ``mesh.get_group(axis)``.
        backend: ``auto`` for kernels where supported, ``reference`` for plain torch.

    Returns:
        Tensors by the fields of ``QuantizedWeight``, each the slice given by ``partition.buffers``,
        on the device of the part; shared data is one tensor. If ``partition.has_whole_blocks``,
        those of ``format.buffer_names`` form a ``QuantizedWeight``. For bf16: ``data``, the rounded
        values.

    Raises:
        LayoutError: part or coordinate do not fit the partition, or ``reduce_max`` is required but
            missing; raised before any communication.
    """
    bounds = partition.bounds(coordinate)
    _check(part, partition, reduce_max)
    if partition.format is None:
        return {"data": part.to(torch.bfloat16, copy=True)}

    def reduce(values: Tensor, maxima: Maxima) -> None:
        for axis in maxima.axes:
            assert reduce_max is not None, "checked where the part is"
            reduce_max(values, axis)

    if partition.has_whole_blocks:
        return _quantize_whole(part, partition, reduce, backend)
    return _quantize_cut(part, partition, bounds, reduce)


def _quantize_whole(
    part: Tensor, partition: Partition, reduce: _Reduce, backend: Backend
) -> dict[str, Tensor]:
    """Quantize a part of whole blocks as a weight; only global amaxes need other ranks."""
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
        reduce(table.exchange, maxima)
    table.encode.launch()
    table.finish.launch()
    return {buffer.name: getattr(target, buffer.name) for buffer in partition.buffers}


def _quantize_cut(
    part: Tensor, partition: Partition, bounds: Bounds, reduce: _Reduce
) -> dict[str, Tensor]:
    format = partition.format
    assert format is not None, "bf16 has no blocks"
    start = bounds["rows"].start, bounds["columns"].start
    origin = reference.padded_start(start, format)
    padded = reference.pad_part(part, start, format)
    found = reference.part_maxima(padded, format)
    for maxima in partition.maxima:
        _reduce_blocks(found[maxima.name], origin, bounds, maxima, reduce)
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


def _reduce_blocks(
    values: Tensor, origin: tuple[int, int], bounds: Bounds, maxima: Maxima, reduce: _Reduce
) -> None:
    """Reduce the maxima of the blocks that the part touches over all ranks, in place.

    ``values`` are [E, n, m] fp32, one per block, starting at row and column ``origin`` of the
    weight.
    """
    shared = values.new_zeros((values.shape[0], *maxima.shape))
    own, among = [slice(None)], [slice(None)]
    spans = bounds["rows"], bounds["columns"]
    for span, base, block, extent in zip(spans, origin, maxima.block, maxima.extent, strict=True):
        first, end = span.start // block, -(-span.stop // block)
        own.append(slice(first - base // block, end - base // block))
        base = span.start // extent * extent // block
        among.append(slice(first - base, end - base))
    shared[tuple(among)] = values[tuple(own)]
    reduce(shared, maxima)
    values[tuple(own)] = shared[tuple(among)]


def _from(span: range, first: int) -> range:
    return range(span.start - first, span.stop - first)


def _check(part: Tensor, partition: Partition, reduce_max: ReduceMax | None) -> None:
    if tuple(part.shape) != partition.part_shape:
        raise LayoutError(
            f"part: expected {list(partition.part_shape)} of a weight {list(partition.shape)}, got "
            f"{list(part.shape)}. Pass one rank's part."
        )
    if part.dtype not in (torch.float32, torch.bfloat16):
        raise LayoutError(f"part: expected fp32 or bf16, got {part.dtype}. Cast it to fp32.")
    axes = dict.fromkeys(axis for maxima in partition.maxima for axis in maxima.axes)
    if axes and reduce_max is None:
        raise LayoutError(
            f"quantize_part: expected reduce_max, for maxima that the ranks of {', '.join(axes)} "
            "share, got None. Pass a function that all-reduces with MAX over a mesh axis."
        )
