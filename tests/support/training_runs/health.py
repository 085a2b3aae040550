"""Weights whose health is measured, whole and in the shards of ranks, by kernels and by torch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe_optim.formats import BlockScaledFormat, QuantizedWeight, reference
from moe_optim.formats.health_figures import Sum
from moe_optim.kernels.health import HealthEntry, HealthTable
from moe_optim.kernels.table_entry import TableEntry
from tests.support.bytes import assert_bytes_equal
from tests.support.inputs import wide_range_weights

COUNTS = [Sum.ELEMENTS, Sum.SATURATED, Sum.FLUSHED, Sum.BLOCKS, Sum.DEAD]
SHAPES = {
    "mxfp8": ((2, 32, 96), (1, 288, 160)),
    "mxfp8_2d": ((2, 32, 96), (1, 288, 160)),
    "nvfp4": ((2, 32, 80), (1, 272, 160)),
    "fp8_block": ((2, 130, 72), (1, 257, 144)),
    "fp8_block_fp32": ((2, 130, 72), (1, 257, 144)),
    "mxfp8_rows": ((2, 33, 96), (1, 289, 160)),
    "mxfp4": ((2, 33, 96), (1, 289, 160)),
    "nvfp4_rows": ((2, 33, 80), (1, 289, 160)),
    "int4": ((2, 33, 96), (1, 289, 160)),
    "int4_g128": ((2, 33, 128), (1, 289, 256)),
}
"""Of each format: weights of several tiles, a whole one among them, with partial ones at edges."""


def masters_of(format: BlockScaledFormat, seed: int = 0) -> list[Tensor]:
    """Return fp32 masters with zeros, dead blocks, also partial ones, and values that flush."""
    masters = []
    for index, shape in enumerate(SHAPES[format.name]):
        master = wide_range_weights(*shape, seed=seed + index, exponents=(-12, 2))
        master[-1, : format.block_row_height] = 0.0
        _, rows, cols = shape
        height, width = format.rowwise_block
        master[0, rows // height * height :] = 0.0  # partial blocks at the edges, if there are any
        master[0, :, max(width, cols // width * width) :] = 0.0
        masters.append(master)
    return masters


def measure(
    format: BlockScaledFormat,
    masters: Sequence[Tensor],
    *,
    cuts: Sequence[float] = (0.0, 1.0),
    shard: int = 0,
    device: Any = "cpu",
    backend: Any = "auto",
) -> tuple[Tensor, Tensor]:
    """Return sums and amaxes, on the CPU, of one shard of each weight.

    Args:
        format: format of the buffers, which are complete on every shard.
        masters: [E, R, C] each.
        cuts: where shards meet, as parts of a weight; rounded to whole bytes.
        shard: which of them.
        device: to measure on.
        backend: who measures.
    """
    entries, first = [], 0
    for master in masters:
        numel = master.numel()
        ends = [int(numel * cut) // 2 * 2 for cut in cuts[:-1]] + [numel]
        low, high = ends[shard], ends[shard + 1]
        quantized = reference.quantize(master, format)
        reference.derive_into(quantized)
        buffers = {name: buffer.to(device) for name, buffer in quantized.buffers().items()}
        target = QuantizedWeight.of_buffers(format, quantized.shape, buffers.values())
        entry = TableEntry(
            parameter="fc",
            source=master.view(-1)[low:high].to(device).clone(),
            target=target,
            start=low,
            cuts=tuple(end for end in ends if 0 < end < numel),
        )
        rows = torch.arange(first, first + len(master))
        entries.append(HealthEntry(entry=entry, rows=rows))
        first += len(master)
    table = HealthTable.build(entries, first, device=torch.device(device), backend=backend)
    for _ in range(2):  # a second pass writes anew
        table.launch()
    return table.sums.cpu(), table.amaxes.cpu()


def assert_same_health(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], what: str) -> None:
    """Counts and amaxes are equal to the bit, other sums but for the order of their terms."""
    assert_bytes_equal(got[1], want[1], what=f"{what}: amax")
    assert_bytes_equal(got[0][:, COUNTS], want[0][:, COUNTS], what=f"{what}: counts")
    torch.testing.assert_close(
        got[0][:, : Sum.ERRORS + 1], want[0][:, : Sum.ERRORS + 1], rtol=1e-12, atol=0.0
    )
    scale = want[0][:, Sum.SQUARES].sqrt().clamp(min=1e-300).unsqueeze(1)
    lanes = slice(len(Sum), None)
    torch.testing.assert_close(
        got[0][:, lanes] / scale, want[0][:, lanes] / scale, rtol=0.0, atol=1e-12
    )
