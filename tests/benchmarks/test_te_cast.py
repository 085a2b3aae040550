"""What a bench holds against Transformer Engine: owned bytes of every buffer, padding left out."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks.te.cast import check_bytes
from moe_optim.errors import PatchError
from moe_optim.formats import DIRECTIONS, FP8_BLOCK, MXFP8, QuantizedWeight
from moe_optim.kernels.member_table import MemberTable, TableEntry
from tests.support.inputs import wide_range_weights

ROWS, COLS = 256, 384


def written_entry(format, rows=ROWS):
    """Return an entry of which the first rows are owned, requantized and derived from."""
    shape = (1, ROWS, COLS)
    source = wide_range_weights(*shape)
    target = QuantizedWeight.empty(format, shape)
    for buffer in target.buffers().values():
        buffer.zero_()
    scales = {
        way: torch.zeros((1, *format.storage_scale_shape(ROWS, COLS, way)), dtype=torch.float32)
        for way in DIRECTIONS
        if format is FP8_BLOCK
    }
    owned = rows * COLS
    entry = TableEntry(
        parameter="fc1",
        source=source if rows == ROWS else source.flatten()[:owned],
        target=target,
        cuts=() if rows == ROWS else (owned,),
        storage_scales=scales,
    )
    table = MemberTable.build([entry])
    table.launch()
    table.finish.launch()
    return entry


def as_te_keeps_it(entry):
    """Return the buffers under the names of Transformer Engine, with scales padded by ones."""
    target = entry.target
    fields = {}
    for way in DIRECTIONS:
        scale = target.scale(way)[0]
        padded = scale.new_ones(target.format.storage_scale_shape(ROWS, COLS, way))
        padded[: scale.shape[0], : scale.shape[1]] = scale
        fields |= {f"_{way}_data": target.data(way)[0].clone(), f"_{way}_scale_inv": padded}
    return SimpleNamespace(**fields)


@pytest.mark.parametrize("format", [MXFP8, FP8_BLOCK], ids=lambda format: format.name)
@pytest.mark.parametrize("rows", [ROWS, 128])
def test_equal_bytes_pass_whatever_lies_in_the_padding(format, rows):
    entry = written_entry(format, rows)
    check_bytes([entry], [as_te_keeps_it(entry)], derived=False)
    check_bytes([entry], [as_te_keeps_it(entry)], derived=rows == ROWS)


@pytest.mark.parametrize("field", ["data", "scale_inv"])
@pytest.mark.parametrize("way", DIRECTIONS)
@pytest.mark.parametrize("format", [MXFP8, FP8_BLOCK], ids=lambda format: format.name)
def test_a_byte_that_differs_is_refused_by_the_name_of_its_buffer(format, way, field):
    entry = written_entry(format)
    weight = as_te_keeps_it(entry)
    getattr(weight, f"_{way}_{field}").view(torch.uint8)[0, 0] ^= 1
    name = f"{way}_{field.removesuffix('_inv')}"
    with pytest.raises(PatchError, match=rf"{name}: expected the bytes .* got 1 of \d+ that"):
        check_bytes([entry], [weight], derived=True)


def test_rows_of_other_ranks_do_not_count():
    entry = written_entry(MXFP8, rows=128)
    weight = as_te_keeps_it(entry)
    for way in DIRECTIONS:
        getattr(weight, f"_{way}_data")[128:] ^= 1
    weight._rowwise_scale_inv[128:] = 7
    weight._columnwise_scale_inv[4:] = 7
    check_bytes([entry], [weight], derived=False)
    weight._columnwise_scale_inv[3, 0] ^= 1
    with pytest.raises(PatchError, match="columnwise_scale: .* got 1 of"):
        check_bytes([entry], [weight], derived=False)
