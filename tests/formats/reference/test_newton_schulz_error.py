"""The stated bound of rounding errors holds and is of use; the oracle is the iteration in fp64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_optim.formats.reference.newton_schulz import COEFFICIENTS, Orthogonalization, orthogonalize
from tests.support.inputs import normal_weights
from tests.support.newton_schulz_error import error_bound

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
STABLE = sorted(set(COEFFICIENTS) - {"cans"})


def observed(how, dtype, x, *, is_folded=False):
    """Return the relative error in the Frobenius norm."""
    exact = orthogonalize(x, how, dtype=torch.float64).double()
    iterate = iterate_folded if is_folded else orthogonalize
    computed = iterate(x, how, dtype=dtype).double()
    return ((computed - exact).norm() / exact.norm()).item()


def iterate_folded(x, how, *, dtype):
    """Iterate as kernels do: W = a I + b A + c A A is rounded once, and X becomes W X."""
    is_tall = x.size(0) > x.size(1)
    x = (x / torch.linalg.vector_norm(x).clamp_min(1e-7)).to(dtype)
    x = x.mT if is_tall else x
    for a, b, c in how.coefficients():
        gram = (x.float() @ x.mT.float()).to(dtype).float()
        factor = c * (gram @ gram) + b * gram + a * torch.eye(len(gram))
        x = (factor.to(dtype).float() @ x.float()).to(dtype)
    return (x.mT if is_tall else x).float()


KINDS = {
    "random": lambda x: x,
    "rank 1": lambda x: x[:, :1] @ x[:1],
    "rank 2": lambda x: x[:, :1] @ x[:1] + x[:, -1:] @ x[-1:],
    "equal entries": torch.ones_like,
    "identity": lambda x: torch.eye(*x.shape),
    "orthogonal": lambda x: torch.linalg.qr(x)[0] if len(x) >= len(x.T) else x[:1],
    "columns that decay": lambda x: x * torch.logspace(0, -5, x.size(1)),
    "rows that decay": lambda x: x * torch.logspace(0, -5, x.size(0))[:, None],
    "sparse": lambda x: x * (x > 1) + torch.eye(*x.shape),
    "subnormal in fp16": lambda x: x * 2.0**-40,
}


@DTYPES
@settings(max_examples=40)
@given(
    coefficient_type=st.sampled_from(sorted(COEFFICIENTS)),
    num_steps=st.integers(1, 10),
    rows=st.integers(1, 70),
    cols=st.integers(1, 70),
    kind=st.sampled_from(sorted(KINDS)),
    seed=st.integers(0, 99),
    is_folded=st.booleans(),
)
def test_errors_stay_within_the_bound(
    dtype, coefficient_type, num_steps, rows, cols, kind, seed, is_folded
):
    how = Orthogonalization(coefficient_type=coefficient_type, num_steps=num_steps)
    x = KINDS[kind](normal_weights(rows, cols, seed=seed))
    bound = error_bound(how, dtype, x, is_folded=is_folded)
    assert bound == math.inf or observed(how, dtype, x, is_folded=is_folded) <= bound


@DTYPES
@pytest.mark.parametrize("shape", [(160, 64), (128, 128)])
@pytest.mark.parametrize("coefficient_type", STABLE)
def test_the_bound_is_within_forty_times_the_error_of_gaussian_matrices(
    coefficient_type, shape, dtype
):
    """That of square ones is within eighty, which have singular values near zero."""
    how, x = Orthogonalization(coefficient_type=coefficient_type), normal_weights(*shape)
    most = 80 if shape[0] == shape[1] else 40
    assert observed(how, dtype, x) <= error_bound(how, dtype, x) <= most * observed(how, dtype, x)


@pytest.mark.parametrize("coefficient_type", STABLE)
def test_the_bound_is_smaller_in_fp16_by_three_bits(coefficient_type):
    how, x = Orthogonalization(coefficient_type=coefficient_type), normal_weights(64, 160)
    ratio = error_bound(how, torch.bfloat16, x) / error_bound(how, torch.float16, x)
    assert 7 < ratio <= 8


def test_iterations_that_diverge_have_no_bound():
    """CANS in bf16 leaves the interval on which its polynomials are bounded."""
    how, x = Orthogonalization(coefficient_type="cans", num_steps=10), torch.ones(3, 3)
    assert not math.isfinite(observed(how, torch.bfloat16, x))
    assert error_bound(how, torch.bfloat16, x) == math.inf
