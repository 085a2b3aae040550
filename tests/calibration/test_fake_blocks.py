"""``moe_optim.fake_quantize`` in a block-scaled format: values of dequantized weights, and STE."""

import pytest
import torch

import moe_optim
from moe_optim.errors import ConfigError, LayoutError
from moe_optim.formats import FORMATS, get_format
from moe_optim.formats.reference import dequantize_bf16, quantize
from tests.support.bytes import assert_bytes_equal
from tests.support.inputs import normal_weights, wide_range_weights

ROWS = tuple(name for name, format in FORMATS.items() if format.is_row_only)
every_format = pytest.mark.parametrize("format", ROWS)


def values_of(weights, format):
    q = quantize(weights, get_format(format))
    return dequantize_bf16(
        q.rowwise_data, q.rowwise_scale, q.format, "rowwise", global_amax=q.global_amax
    )


@every_format
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_values_are_those_of_dequantized_quantized_weights(format, dtype):
    weights = wide_range_weights(3, 5, 256, exponents=(-12, 6)).to(dtype)
    want = values_of(weights, format)
    assert_bytes_equal(moe_optim.fake_quantize(weights, format=format), want)
    listed = moe_optim.fake_quantize(list(weights), format=format)
    assert_bytes_equal(torch.stack(listed), want)


@every_format
def test_gradients_pass_unchanged(format):
    """Straight through: nothing is clipped, not even what saturates."""
    weights = [wide_range_weights(4, 128, seed=i).bfloat16().requires_grad_() for i in range(2)]
    gradients = [normal_weights(4, 128, seed=9).bfloat16(), normal_weights(4, 128).bfloat16()]
    results = moe_optim.fake_quantize(weights, format=format)
    for got, want in zip(torch.autograd.grad(results, weights, gradients), gradients, strict=True):
        assert_bytes_equal(got, want)


def test_fp32_weights_get_gradients_in_fp32():
    weights = normal_weights(1, 2, 32).requires_grad_()
    moe_optim.fake_quantize(weights, format="int4").sum().backward()
    assert_bytes_equal(weights.grad, torch.ones(1, 2, 32))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"format": "mxfp9"}, ConfigError, "expected one of"),
        ({"format": "mxfp8"}, ConfigError, "expected mxfp8_rows or mxfp4 or "),
        ({"format": "int4", "bits": 4}, ConfigError, "format: expected neither amax nor bits"),
        ({"format": "int4", "amax": torch.ones(2)}, ConfigError, "format: expected neither"),
        ({"format": "int4_g128"}, LayoutError, "columns divisible by 128"),
        ({"format": "int4", "dtype": torch.float16}, LayoutError, "fp32 or bf16"),
        ({}, LayoutError, "amax: expected a tensor of 2"),
    ],
    ids=str,
)
def test_bad_input_gets_one_clear_error(given, error, message):
    weights = normal_weights(2, 4, 64).to(given.pop("dtype", torch.float32))
    with pytest.raises(error, match=message):
        moe_optim.fake_quantize(weights, **given)


@pytest.mark.parametrize(("format", "listed"), [("mxfp4", True), ("nvfp4_rows", False)])
def test_compiled_graphs_give_the_same_bits(format, listed):
    weights = normal_weights(2, 4, 64).bfloat16().requires_grad_()
    gradient = normal_weights(2, 4, 64, seed=3).bfloat16()

    def run(values):
        experts = list(values) if listed else values
        results = moe_optim.fake_quantize(experts, format=format)
        return torch.stack(results) if listed else results

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for call in (run, compiled):
        result = call(weights)
        assert_bytes_equal(result, values_of(weights, format))
        assert_bytes_equal(torch.autograd.grad(result, weights, gradient)[0], gradient)
