"""Orthogonalization equals emerging-optimizers to the bit on a CPU, matrices and batches."""

from dataclasses import replace

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

from moe_optim.errors import ConfigError
from moe_optim.formats.reference.muon import COEFFICIENTS, Orthogonalization, orthogonalize
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
    seed=st.integers(0, 9),
)
@example(how=Orthogonalization(), batch=(), rows=96, cols=32, exponent=0, seed=0)
@example(how=Orthogonalization(), batch=(2,), rows=130, cols=257, exponent=0, seed=0)
def test_every_method_and_shape_equals_emerging_optimizers(how, batch, rows, cols, exponent, seed):
    x = normal_weights(*batch, rows, cols, seed=seed) * 2.0**exponent
    before = x.clone()
    assert_bytes_equal(orthogonalize(x, how), stock(x, how))
    assert_bytes_equal(x, before, what="input")


@pytest.mark.parametrize("coefficient_type", COEFFICIENTS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("shape", [(48, 160), (2, 160, 48)])
def test_every_coefficient_type_equals_emerging_optimizers(coefficient_type, precision, shape):
    x = normal_weights(*shape)
    for num_steps in (5, 11):
        how = Orthogonalization(
            coefficient_type=coefficient_type, num_steps=num_steps, precision=precision
        )
        assert_bytes_equal(orthogonalize(x, how), stock(x, how))


@given(how=METHODS, rows=SIDES, cols=SIDES, transpose=st.booleans())
def test_a_chosen_side_equals_emerging_optimizers(how, rows, cols, transpose):
    x = normal_weights(rows, cols)
    assert_bytes_equal(
        orthogonalize(x, how, transpose=transpose), stock(x, how, transpose=transpose)
    )


@given(how=METHODS, rows=SIDES, cols=SIDES)
def test_strides_of_the_input_are_those_of_emerging_optimizers(how, rows, cols):
    x = normal_weights(cols, rows).mT
    assert_bytes_equal(orthogonalize(x, how), stock(x, how))


def test_a_matrix_of_zeros_stays_zero():
    x = torch.zeros(4, 6)
    assert_bytes_equal(orthogonalize(x, Orthogonalization()), x)


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


def test_types_start_again_or_repeat_their_last_step():
    simple, (*_, last) = COEFFICIENTS["simple"], COEFFICIENTS["cans"]
    how = Orthogonalization(coefficient_type="quintic", num_steps=7)
    assert how.coefficients() == COEFFICIENTS["quintic"] + COEFFICIENTS["quintic"][:2]
    assert replace(how, coefficient_type="cans").coefficients()[4:] == (last,) * 3
    assert replace(how, coefficient_type="simple").coefficients() == simple * 7


@given(rows=st.integers(1, 100_000), cols=st.integers(1, 100_000))
def test_scales_are_those_of_emerging_optimizers(rows, cols):
    for mode in SCALE_MODES:
        how = Orthogonalization(scale_mode=mode, extra_scale_factor=0.2)
        assert how.scale(rows, cols) == get_muon_scale_factor(rows, cols, mode=mode)


def test_medium_iterates_in_bf16_and_the_others_in_fp32():
    dtypes = [Orthogonalization(precision=precision).dtype for precision in PRECISIONS]
    assert dtypes == [torch.bfloat16, torch.float32, torch.float32]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"coefficient_type": "custom"},
            "Muon's coefficient_type: expected simple or quintic or polar_express or cans or aol "
            "or deepseekv4, got 'custom'. Write one of the expected values.",
        ),
        (
            {"scale_mode": "rms"},
            "Muon's scale_mode: expected spectral or unit_rms_norm or shape_scaling, got 'rms'. "
            "Write one of the expected values.",
        ),
        (
            {"precision": "low"},
            "Muon's precision: expected medium or high or highest, got 'low'. Write one of the "
            "expected values.",
        ),
        (
            {"num_steps": 0},
            "Muon's num_steps: expected at least 1, got 0. Write 5, the default, or another "
            "positive number.",
        ),
    ],
)
def test_unknown_settings_are_refused_with_those_accepted(settings, message):
    with pytest.raises(ConfigError) as error:
        Orthogonalization(**settings)
    assert str(error.value) == message
