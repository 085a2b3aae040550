"""Formats as values, and the contract of the record that holds quantized buffers."""

from dataclasses import replace

import pytest
import torch

from moe_optim.errors import ConfigError, LayoutError
from moe_optim.formats import (
    FORMATS,
    FP8_BLOCK,
    INT4,
    MXFP8,
    MXFP8_2D,
    NVFP4,
    BlockScaledFormat,
    QuantizedWeight,
    get_format,
)

every_format = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS.keys())

SHAPE = (2, 192, 384)
LOGICAL_SHAPES = {  # of SHAPE: rowwise data, scale, columnwise data, scale
    "mxfp8": ((2, 192, 384), (2, 192, 12), (2, 192, 384), (2, 6, 384)),
    "mxfp8_2d": ((2, 192, 384), (2, 6, 12), (2, 192, 384), (2, 12, 6)),
    "nvfp4": ((2, 192, 192), (2, 12, 24), (2, 384, 96), (2, 24, 12)),
    "fp8_block": ((2, 192, 384), (2, 2, 3), (2, 384, 192), (2, 3, 2)),
    "fp8_block_fp32": ((2, 192, 384), (2, 2, 3), (2, 384, 192), (2, 3, 2)),
    "mxfp8_rows": ((2, 192, 384), (2, 192, 12)) * 2,
    "mxfp4": ((2, 192, 192), (2, 192, 12)) * 2,
    "nvfp4_rows": ((2, 192, 192), (2, 192, 24)) * 2,
    "int4": ((2, 192, 192), (2, 192, 12)) * 2,
    "int4_g128": ((2, 192, 192), (2, 192, 3)) * 2,
}
BYTES_PER_PARAMETER = {  # stored, and gathered; without a global amax
    "mxfp8": (2 + 2 / 32, 2 + 2 / 32),
    "mxfp8_2d": (1 + 2 / 1024, 1 + 1 / 1024),
    "nvfp4": (1 + 2 / 256, 0.5 + 1 / 256),
    "fp8_block": (2 + 8 / 128**2, 1 + 4 / 128**2),
    "fp8_block_fp32": (2 + 8 / 128**2, 1 + 4 / 128**2),
    "mxfp8_rows": (1 + 1 / 32, 1 + 1 / 32),
    "mxfp4": (0.5 + 1 / 32, 0.5 + 1 / 32),
    "nvfp4_rows": (0.5 + 1 / 16, 0.5 + 1 / 16),
    "int4": (0.5 + 2 / 32, 0.5 + 2 / 32),
    "int4_g128": (0.5 + 2 / 128, 0.5 + 2 / 128),
}

STORAGE_SCALE_SHAPES = {  # of [192, 320]: rowwise, columnwise
    "mxfp8": ((256, 12), (8, 384)),
    "mxfp8_2d": ((256, 12), (8, 384)),
    "nvfp4": ((256, 20), (384, 12)),
    "fp8_block": ((2, 4), (3, 4)),
    "fp8_block_fp32": ((2, 4), (3, 4)),
}

STORAGE_SCALE_REPEAT = {  # storage rows and columns of one block scale: rowwise, columnwise
    "mxfp8": ((1, 1), (1, 1)),
    "mxfp8_2d": ((32, 1), (1, 32)),
    "nvfp4": ((16, 1), (16, 1)),
    "fp8_block": ((1, 1), (1, 1)),
    "fp8_block_fp32": ((1, 1), (1, 1)),
}


@pytest.mark.parametrize("name", STORAGE_SCALE_SHAPES)
def test_storage_scale_shapes_and_repetition(name):
    format = FORMATS[name]
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
def test_bytes_per_parameter(format):
    """Counted on a weight whose blocks are all whole; a global amax counts apart."""
    q = QuantizedWeight.empty(format, (2, 256, 512))
    stored, gathered = BYTES_PER_PARAMETER[format.name]
    for buffers, want in ((q.buffers(), stored), (q.gathered_buffers(), gathered)):
        nbytes = sum(buffer.nbytes for name, buffer in buffers.items() if name != "global_amax")
        assert nbytes == want * 2 * 256 * 512
    assert format.gathered_bytes_per_element == gathered


@every_format
def test_rows_of_a_row_only_weight_may_be_any_number(format):
    """Blocks lie in rows, so that only columns must be whole blocks."""
    if format.is_row_only:
        assert format.check_shape((1, 3, 128)) == (1, 3, 128)
        with pytest.raises(LayoutError, match=rf"needs columns divisible by .* got \[3, {8}\]"):
            format.check_shape((1, 3, 8))
    elif format.dimension_multiple > 1:
        with pytest.raises(LayoutError, match=r"needs rows and columns divisible by"):
            format.check_shape((1, 3, 128))


@pytest.mark.parametrize("name", ["bf16", "mxfp6", ""])
def test_an_unknown_name_is_refused_with_the_known_ones(name):
    with pytest.raises(ConfigError, match=f"{', '.join(LOGICAL_SHAPES)}, got '{name}'"):
        get_format(name)


@every_format
def test_empty_storage_has_the_promised_buffers(format):
    q = QuantizedWeight.empty(format, SHAPE)
    assert isinstance(q.format, BlockScaledFormat)
    got = tuple(
        tuple(buffer.shape)
        for buffer in (q.rowwise_data, q.rowwise_scale, q.columnwise_data, q.columnwise_scale)
    )
    assert got == LOGICAL_SHAPES[format.name]
    assert q.rowwise_data.dtype == q.columnwise_data.dtype == torch.uint8
    assert q.rowwise_scale.dtype == q.columnwise_scale.dtype == format.scale_dtype
    shares_data = format.columnwise_copy in ("shared", "none")
    assert (q.columnwise_data is q.rowwise_data) == shares_data
    assert (q.columnwise_scale is q.rowwise_scale) == format.is_row_only
    assert (q.global_amax is not None) == format.has_global_amax


BROKEN = {
    "data shape": (
        MXFP8,
        {"rowwise_data": torch.empty(2, 64, 32, dtype=torch.uint8)},
        r"rowwise_data: mxfp8 of shape \[2, 64, 64\] needs \[2, 64, 64\] torch.uint8, "
        r"got \[2, 64, 32\]",
    ),
    "scale shape": (
        MXFP8, {"columnwise_scale": torch.empty(2, 64, 2, dtype=torch.uint8)},
        r"columnwise_scale: .* needs \[2, 2, 64\] torch.uint8, got \[2, 64, 2\]"),
    "another device": (
        MXFP8, {"rowwise_scale": torch.empty(2, 64, 2, dtype=torch.uint8, device="meta")},
        "rowwise_scale: expected the device of rowwise_data, cpu, got meta"),
    "amax missing": (NVFP4, {"global_amax": None}, r"global_amax: nvfp4 needs \[2\].* got None"),
    "data not shared": (
        MXFP8_2D, {"columnwise_data": torch.empty(2, 64, 64, dtype=torch.uint8)},
        "columnwise_data: mxfp8_2d has one data buffer for both directions, got a second one"),
    "bf16 scales in fp32": (
        INT4, {"rowwise_scale": torch.empty(2, 64, 2)},
        r"rowwise_scale: .* needs \[2, 64, 2\] torch.bfloat16, got \[2, 64, 2\] torch.float32"),
}  # fmt: skip


@pytest.mark.parametrize(("format", "changes", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_a_buffer_that_breaks_the_contract_is_named(format, changes, message):
    q = QuantizedWeight.empty(format, (2, 64, 64))
    with pytest.raises(LayoutError, match=f"QuantizedWeight.*{message}"):
        replace(q, **changes)
