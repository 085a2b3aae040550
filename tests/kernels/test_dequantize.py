"""The launch of a dequantization, without a GPU: values are the reference's."""

import pytest
import torch

from moe_optim import ops
from moe_optim.formats import FORMATS
from moe_optim.formats.reference import dequantize_bf16
from moe_optim.kernels import dequantize as dequantize_module
from moe_optim.kernels.dequantize import dequantize
from moe_optim.kernels.plan import BoundKernel
from tests.support.bytes import assert_values_equal
from tests.support.inputs import normal_weights, wide_range_weights, with_specials

pytestmark = pytest.mark.slow
PAIRS = [
    pytest.param(format, direction, id=f"{format.name}-{direction}")
    for format in FORMATS.values()
    for direction in format.directions
]
every_buffer = pytest.mark.parametrize(("format", "direction"), PAIRS)


def check(quantized, direction):
    got = ops.dequantize(quantized, direction)
    want = ops.dequantize(quantized, direction, backend="reference")
    assert_values_equal(got, want, quantized.format.name)


@every_buffer
def test_values_are_the_references(format, direction, launches):
    """Two experts, of several tiles and an edge, with special values, zeros and tiny ones."""
    weights = torch.cat(
        [
            with_specials(wide_range_weights(1, 160, 384, seed=2), every=41),
            wide_range_weights(1, 160, 384, seed=3, exponents=(-140, -110)),
        ]
    )
    weights[1, 32:64, 128:256] = 0
    if format.block("rowwise")[0] == 128 or format.block("rowwise")[1] == 128:
        weights = weights[:, :128]
    quantized = ops.quantize(weights, format, backend="reference")
    launches.clear()
    check(quantized, direction)
    assert launches == ["dequantize_kernel"]


@every_buffer
def test_every_code_under_every_kind_of_scale(format, direction, launches):
    """Bytes that no quantization gives decode like the reference's, NaN included."""
    generator = torch.Generator().manual_seed(5)
    quantized = ops.quantize(normal_weights(1, 128, 256), format, backend="reference")
    data, scale = quantized.data(direction), quantized.scale(direction)
    data.copy_(torch.randint(256, data.shape, generator=generator).to(torch.uint8))
    if scale.dtype == torch.uint8:
        scale.copy_(torch.randint(256, scale.shape, generator=generator).to(torch.uint8))
    check(quantized, direction)


def test_scales_in_any_strides(launches):
    format = FORMATS["mxfp8_rows"]
    quantized = ops.quantize(normal_weights(2, 24, 96), format, backend="reference")
    wide = torch.full((2, 32, 8), 7, dtype=torch.uint8)
    wide[:, :24, :3] = quantized.rowwise_scale
    given = quantized.rowwise_data, wide[:, :24, :3], format
    assert_values_equal(dequantize(*given), dequantize_bf16(*given), "padded")
    assert launches == ["dequantize_kernel"]


def test_a_kernel_is_not_loaded_while_a_graph_is_captured(launches, monkeypatch):
    """Plain torch reads the values; a kernel that an earlier launch compiled is captured."""
    monkeypatch.setattr(dequantize_module, "is_capturing", lambda device: True)
    quantized = ops.quantize(normal_weights(2, 32, 32), "mxfp8_2d", backend="reference")
    check(quantized, "columnwise")
    assert launches == []
    monkeypatch.setattr(BoundKernel, "is_compiled", True)
    check(quantized, "columnwise")
    assert launches == ["dequantize_kernel"]
