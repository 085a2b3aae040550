"""One launch dequantizes a weight on a GPU, to the values of plain torch."""

import pytest
import torch

from moe_optim import ops
from moe_optim.formats import FORMATS
from tests.support.bytes import assert_values_equal
from tests.support.inputs import normal_weights, wide_range_weights, with_specials

pytestmark = pytest.mark.gpu

SHAPES = ((1, 128, 128), (2, 160, 384), (3, 768, 2048))


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_values_are_the_references(format):
    for shape in SHAPES:
        fits = all(size % max(format.block("rowwise")) == 0 for size in shape[1:])
        if not fits:
            continue
        weights = with_specials(wide_range_weights(*shape, seed=2), every=1021)
        weights[-1] = normal_weights(*shape[1:])
        quantized = ops.quantize(weights.cuda(), format)
        for direction in format.directions:
            got = ops.dequantize(quantized, direction)
            want = ops.dequantize(quantized, direction, backend="reference")
            assert_values_equal(got, want, f"{shape} {direction}")


@pytest.mark.parametrize("name", ["mxfp8_2d", "nvfp4", "int4"])
def test_a_compiled_graph_and_a_cuda_graph_read_the_same_values(name):
    quantized = ops.quantize(normal_weights(2, 256, 256).cuda(), name)
    want = ops.dequantize(quantized, backend="reference")
    compiled = torch.compile(lambda one: ops.dequantize(one), fullgraph=True)
    assert_values_equal(compiled(quantized), want, "compiled")
    ops.dequantize(quantized)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = ops.dequantize(quantized)
    graph.replay()
    assert_values_equal(got, want, "replayed")
