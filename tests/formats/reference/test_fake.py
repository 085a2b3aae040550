"""Fake quantization by its definition: hand-derived values, and NVIDIA ModelOpt's own formulas.

ModelOpt's file is imported alone, where its wheel lies unpacked on the path, and skipped where not:
see test_independent_sources.py.
"""

import math
import warnings
from functools import cache
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_optim.formats.reference.fake import clip_gradient, code_range, fake_quantize
from tests.support.bytes import assert_values_equal
from tests.support.inputs import normal_weights, wide_range_weights, with_specials
from tests.support.number_formats.fake_values import (
    GRADIENT_CASES,
    GRIDS,
    TINY,
    by_grid,
    gradient_tensors,
    value_tensors,
)
from tests.support.number_formats.independent_sources import import_source

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
every_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
every_grid = pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)


def quantized(values, amax, bits, narrow_range=False):
    bits = None if bits == "e4m3" else bits
    return fake_quantize(values, amax, bits, narrow_range=narrow_range)


@every_dtype
def test_values_of_every_grid_and_dtype(dtype):
    """All cases of a grid in one tensor; those beyond the range of fp16 are left out there."""
    for bits, narrow_range, cases in by_grid(dtype):
        values, amax, result = value_tensors(cases, dtype)
        assert_values_equal(quantized(values, amax, bits, narrow_range), result, f"{bits}")


@every_dtype
def test_gradients(dtype):
    values, amax, gradients, wanted = gradient_tensors(dtype)
    got = clip_gradient(values, amax, gradients)
    for name, one, other in zip(GRADIENT_CASES, got, wanted, strict=True):
        assert_values_equal(one, other, name)


@given(
    value=st.floats(-4.0, 4.0, width=32),
    amax=st.floats(2.0**-20, 2.0, width=32),
    bits=st.sampled_from([2, 4, 8, 12]),
)
def test_an_integer_grid_has_equal_steps_and_the_nearest_is_taken(value, amax, bits):
    low, high = code_range(bits, narrow_range=False)
    step = amax / high
    got = fake_quantize(torch.tensor(value), torch.tensor(amax), bits).item()
    code = got / step
    assert abs(code - round(code)) < 1e-3 and low <= round(code) <= high
    if low * step <= value <= high * step:
        assert abs(got - value) <= step * (0.5 + 1e-3)


@cache
def modelopt():
    """Return ModelOpt's module of fake quantization; its CUDA extensions are not there."""
    root = "modelopt.torch"
    given = {
        f"{root}.kernels": {},
        f"{root}.kernels.quantization": {},
        f"{root}.kernels.quantization.gemm": {"IS_AVAILABLE": False},
        f"{root}.quantization.config": {"QuantizerAttributeConfig": lambda **_: None},
        f"{root}.quantization.extensions": dict.fromkeys(
            ("get_cuda_ext", "get_cuda_ext_fp8", "get_cuda_ext_mx")
        ),
        f"{root}.quantization.utils": {},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it registers ops of TensorRT, once a process
        return import_source(f"{root}.quantization.tensor_quant", given)


def modelopts(values, amax, bits, narrow_range=False):
    if bits == "e4m3":
        return modelopt().scaled_e4m3(values, amax, None, 4, 3)
    return modelopt().fake_tensor_quant(values, amax, None, bits, False, narrow_range)


def amax_of(values, axis):
    return values.abs().amax((1, 2), keepdim=True) if axis == 0 else values.abs().amax()


def wide(dtype, seed=0):
    values = wide_range_weights(6, 24, 40, seed=seed, exponents=(-18, 12))
    return values.to(dtype)


INPUTS = {
    "normal": lambda dtype: normal_weights(6, 24, 40).to(dtype),
    "wide": wide,
    "ties": lambda dtype: (torch.arange(6 * 24 * 40).view(6, 24, 40) / 4 - 700).to(dtype),
    "special": lambda dtype: with_specials(normal_weights(6, 24, 40)).to(dtype),
}


@every_dtype
@every_grid
@pytest.mark.parametrize("axis", [0, None])
def test_values_and_gradients_are_modelopts_to_the_bit(axis, grid, dtype):
    """With an amax that holds everything, and with one that clips a part."""
    for source, part in product((make(dtype) for make in INPUTS.values()), (1.0, 0.3)):
        amax = amax_of(source.nan_to_num(0, 1, -1), axis).float() * part
        values = source.clone().requires_grad_()
        theirs = modelopts(values, amax, **grid)
        gradient = normal_weights(6, 24, 40, seed=1).to(dtype)
        theirs.backward(gradient)
        assert_values_equal(quantized(source, amax, **grid), theirs.detach())
        if amax.dim():  # else it rounds the amax to the dtype of the values, see below
            assert_values_equal(clip_gradient(source, amax, gradient), values.grad, "gradient")


@every_grid
def test_an_amax_of_zero_does_what_modelopts_does(grid):
    amax = torch.tensor([0.0, TINY, math.nextafter(TINY, 1), 1.0]).view(4, 1, 1)
    source = normal_weights(4, 8, 8)
    values = source.clone().requires_grad_()
    theirs = modelopts(values, amax, **grid)
    assert_values_equal(quantized(source, amax, **grid), theirs.detach())
    theirs.sum().backward()
    assert_values_equal(clip_gradient(source, amax, torch.ones_like(source)), values.grad)
