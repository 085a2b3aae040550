"""Formats as values, and the contract of the record that holds quantized buffers."""

from dataclasses import replace

import pytest
import torch

from moe_optim.errors import ConfigError, LayoutError
from moe_optim.formats import (
    FORMATS,
    FP8_BLOCK,
    MXFP8,
    MXFP8_2D,
    NVFP4,
    BlockScaledFormat,
    QuantizedWeight,
    get_format,
)

every_format = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS.keys())

LOGICAL_SHAPES = {  # of [2, 192, 320]: rowwise data, scale, columnwise data, scale
    "mxfp8": ((2, 192, 320), (2, 192, 10), (2, 192, 320), (2, 6, 320)),
    "mxfp8_2d": ((2, 192, 320), (2, 6, 10), (2, 192, 320), (2, 10, 6)),
    "nvfp4": ((2, 192, 160), (2, 12, 20), (2, 320, 96), (2, 20, 12)),
    "fp8_block": ((2, 192, 320), (2, 2, 3), (2, 320, 192), (2, 3, 2)),
}

STORAGE_SCALE_SHAPES = {  # of [192, 320]: rowwise, columnwise
    "mxfp8": ((256, 12), (8, 384)),
    "mxfp8_2d": ((256, 12), (8, 384)),
    "nvfp4": ((256, 20), (384, 12)),
    "fp8_block": ((2, 4), (3, 4)),
}

STORAGE_SCALE_REPEAT = {  # storage rows and columns of one block scale: rowwise, columnwise
    "mxfp8": ((1, 1), (1, 1)),
    "mxfp8_2d": ((32, 1), (1, 32)),
    "nvfp4": ((16, 1), (16, 1)),
    "fp8_block": ((1, 1), (1, 1)),
}


@every_format
def test_logical_shapes(format):
    shape = (2, 192, 320)
    got = (
        format.data_shape(shape, "rowwise"),
        format.scale_shape(shape, "rowwise"),
        format.data_shape(shape, "columnwise"),
        format.scale_shape(shape, "columnwise"),
    )
    assert got == LOGICAL_SHAPES[format.name]


@every_format
def test_storage_scale_shapes_and_repetition(format):
    rowwise, columnwise = STORAGE_SCALE_SHAPES[format.name]
    assert format.storage_scale_shape(192, 320, "rowwise") == rowwise
    assert format.storage_scale_shape(192, 320, "columnwise") == columnwise
    rowwise, columnwise = STORAGE_SCALE_REPEAT[format.name]
    assert format.storage_scale_repeat("rowwise") == rowwise
    assert format.storage_scale_repeat("columnwise") == columnwise


def test_fp8_blocks_at_the_edge_may_be_partial():
    assert FP8_BLOCK.check_shape((1, 130, 1)) == (1, 130, 1)
    assert FP8_BLOCK.scale_shape((1, 130, 1), "rowwise") == (1, 2, 1)
    assert FP8_BLOCK.scale_shape((1, 130, 1), "columnwise") == (1, 1, 2)


@every_format
def test_wire_bytes_agree_with_the_buffers(format):
    """Counted on a weight whose blocks are all whole; a global amax travels apart."""
    q = QuantizedWeight.empty(format, (2, 256, 512))
    buffers = (buffer for d in format.gathered_directions for buffer in (q.data(d), q.scale(d)))
    assert (
        sum(buffer.nbytes for buffer in buffers)
        == format.gathered_bytes_per_element * 2 * 256 * 512
    )


@pytest.mark.parametrize("name", ["bf16", "mxfp4", ""])
def test_an_unknown_name_is_refused_with_the_known_ones(name):
    with pytest.raises(ConfigError, match=f"mxfp8, mxfp8_2d, nvfp4, fp8_block, got '{name}'"):
        get_format(name)


@every_format
def test_empty_storage_has_the_promised_buffers(format):
    q = QuantizedWeight.empty(format, (2, 192, 320))
    assert isinstance(q.format, BlockScaledFormat)
    got = tuple(
        tuple(buffer.shape)
        for buffer in (q.rowwise_data, q.rowwise_scale, q.columnwise_data, q.columnwise_scale)
    )
    assert got == LOGICAL_SHAPES[format.name]
    assert q.rowwise_data.dtype == q.columnwise_data.dtype == torch.uint8
    assert q.rowwise_scale.dtype == q.columnwise_scale.dtype == format.scale_dtype
    assert (q.columnwise_data is q.rowwise_data) == (format.columnwise_copy == "shared")
    assert (q.global_amax is not None) == format.has_global_amax


def test_buffers_may_be_views_of_a_larger_allocation():
    """Padded storage is described, not copied."""
    storage = torch.zeros(2, 256, 12, dtype=torch.uint8)
    q = replace(QuantizedWeight.empty(MXFP8, (2, 192, 320)), rowwise_scale=storage[:, :192, :10])
    assert q.rowwise_scale.data_ptr() == storage.data_ptr()


BROKEN = {
    "data shape": (
        MXFP8,
        {"rowwise_data": torch.empty(2, 64, 32, dtype=torch.uint8)},
        r"rowwise_data: mxfp8 of shape \[2, 64, 64\] needs \[2, 64, 64\] torch.uint8, "
        r"got \[2, 64, 32\]",
    ),
    "data dtype": (
        MXFP8,
        {"columnwise_data": torch.empty(2, 64, 64, dtype=torch.float8_e4m3fn)},
        r"columnwise_data: .* torch.uint8, got \[2, 64, 64\] torch.float8_e4m3fn",
    ),
    "scale shape": (
        MXFP8,
        {"columnwise_scale": torch.empty(2, 64, 2, dtype=torch.uint8)},
        r"columnwise_scale: .* needs \[2, 2, 64\] torch.uint8, got \[2, 64, 2\]",
    ),
    "scale dtype": (
        FP8_BLOCK,
        {"rowwise_scale": torch.empty(2, 1, 1, dtype=torch.float64)},
        r"rowwise_scale: .* torch.float32, got \[2, 1, 1\] torch.float64",
    ),
    "another device": (
        MXFP8,
        {"rowwise_scale": torch.empty(2, 64, 2, dtype=torch.uint8, device="meta")},
        r"rowwise_scale: expected the device of rowwise_data, cpu, got meta",
    ),
    "amax missing": (NVFP4, {"global_amax": None}, r"global_amax: nvfp4 needs \[2\].* got None"),
    "amax superfluous": (
        MXFP8,
        {"global_amax": torch.zeros(2)},
        r"global_amax: mxfp8 has none, got a tensor",
    ),
    "data not shared": (
        MXFP8_2D,
        {"columnwise_data": torch.empty(2, 64, 64, dtype=torch.uint8)},
        r"columnwise_data: mxfp8_2d shares one data buffer, got a second one",
    ),
    "rows no multiple": (MXFP8, {"shape": (2, 63, 64)}, r"shape: mxfp8 needs .* got \[63, 64\]"),
    "two sizes": (MXFP8, {"shape": (64, 64)}, r"expected a shape \[experts, rows, cols\]"),
}


@pytest.mark.parametrize(("format", "changes", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_a_buffer_that_breaks_the_contract_is_named(format, changes, message):
    q = QuantizedWeight.empty(format, (2, 64, 64))
    with pytest.raises(LayoutError, match=f"QuantizedWeight.*{message}"):
        replace(q, **changes)


@pytest.mark.parametrize("format", FORMATS.values(), ids=lambda format: format.name)
def test_buffers_hold_data_and_scales_of_both_directions(format):
    """Tests that go from buffer to buffer rely on it: none of them is left out of the list."""
    quantized = QuantizedWeight.empty(format, (1, 128, 128), device="cpu")
    fields = ("rowwise_data", "rowwise_scale", "columnwise_data", "columnwise_scale", "global_amax")
    held = {name: one for name in fields if (one := getattr(quantized, name)) is not None}
    listed = quantized.buffers()
    assert listed.keys() <= held.keys()
    assert {one.data_ptr() for one in listed.values()} == {one.data_ptr() for one in held.values()}
    assert len(listed) >= 3
