"""Orthogonalization equals emerging-optimizers to the bit on a CPU, matrices and batches."""

import pytest
import torch
from emerging_optimizers.orthogonalized_optimizers.muon import get_muon_scale_factor
from emerging_optimizers.orthogonalized_optimizers.muon_utils import (
    _COEFFICIENT_SETS,
    newton_schulz,
)
from emerging_optimizers.utils import fp32_matmul_precision
from hypothesis import example, given
from hypothesis import strategies as st

from moe_optim.formats.reference.newton_schulz import COEFFICIENTS, Orthogonalization, orthogonalize
from tests.support.bytes import assert_bytes_equal
from tests.support.inputs import normal_weights

PRECISIONS = ("medium", "high", "highest")
SCALE_MODES = ("spectral", "unit_rms_norm", "shape_scaling")

SIDES = st.integers(1, 48)
METHODS = st.builds(
    Orthogonalization,
    coefficient_type=st.sampled_from(sorted(COEFFICIENTS)),
    num_steps=st.integers(1, 12),
    precision=st.sampled_from(PRECISIONS),
)


def stock(x, how, **arguments):
    with fp32_matmul_precision(how.precision):
        return newton_schulz(x, how.num_steps, how.coefficient_type, **arguments)


# Whole matrices


@given(
    how=METHODS,
    batch=st.sampled_from([(), (1,), (3,)]),
    rows=SIDES,
    cols=SIDES,
    exponent=st.integers(-60, 60),
    transpose=st.sampled_from([None, False, True]),
    is_strided=st.booleans(),
)
@example(Orthogonalization(), (), 96, 32, 0, None, False)
@example(Orthogonalization(), (2,), 130, 257, 0, None, False)
def test_every_method_and_shape_equals_emerging_optimizers(
    how, batch, rows, cols, exponent, transpose, is_strided
):
    x = normal_weights(*batch, rows, cols) * 2.0**exponent
    x = x.mT.contiguous().mT if is_strided else x
    before = x.clone()
    want = stock(x, how, transpose=transpose)
    assert_bytes_equal(orthogonalize(x, how, transpose=transpose), want)
    assert_bytes_equal(x, before, what="input")


@pytest.mark.parametrize("coefficient_type", COEFFICIENTS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_coefficient_type_equals_emerging_optimizers(coefficient_type, precision):
    """Also past the last of its steps."""
    x = normal_weights(2, 160, 48)
    how = Orthogonalization(coefficient_type=coefficient_type, num_steps=11, precision=precision)
    assert_bytes_equal(orthogonalize(x, how), stock(x, how))


def test_singular_values_go_to_one():
    """The oracle is the singular value decomposition."""
    how = Orthogonalization(coefficient_type="polar_express", num_steps=8, precision="highest")
    for shape in ((24, 40), (40, 24)):
        x = normal_weights(*shape)
        u, _, v = torch.linalg.svd(x.double(), full_matrices=False)
        assert (orthogonalize(x, how).double() - u @ v).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_given_dtype_holds_the_iterates_whatever_the_precision(dtype):
    """The iteration is written out, on a wide matrix."""
    x = normal_weights(24, 40)
    for precision in PRECISIONS:
        how = Orthogonalization(coefficient_type="simple", num_steps=2, precision=precision)
        want = torch.nn.functional.normalize(x, dim=(0, 1)).to(dtype)
        for _ in range(2):
            gram = want @ want.T
            want = torch.addmm(
                want, torch.addmm(gram, gram, gram, beta=-4.775, alpha=2.0315), want, beta=3.4445
            )
        assert_bytes_equal(orthogonalize(x, how, dtype=dtype), want.float())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_precision_of_the_caller_neither_matters_nor_changes(precision):
    x, how = normal_weights(24, 40), Orthogonalization(precision=precision)
    want = orthogonalize(x, how)
    for outer in PRECISIONS:
        with fp32_matmul_precision(outer):
            assert_bytes_equal(orthogonalize(x, how), want)
            with pytest.raises(NotImplementedError):
                orthogonalize(x, how, dtype=torch.bool)
            assert torch.get_float32_matmul_precision() == outer


# Settings


def test_coefficients_are_those_of_emerging_optimizers():
    wanted = {name: tuple(steps) for name, steps in _COEFFICIENT_SETS.items()}
    assert dict(COEFFICIENTS) == wanted


@given(rows=st.integers(1, 100_000), cols=st.integers(1, 100_000))
def test_scales_are_those_of_emerging_optimizers(rows, cols):
    for mode in SCALE_MODES:
        how = Orthogonalization(scale_mode=mode, extra_scale_factor=0.2)
        assert how.scale(rows, cols) == get_muon_scale_factor(rows, cols, mode=mode)
