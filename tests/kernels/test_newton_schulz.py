"""The Newton-Schulz iteration over a batch of matrices, without a GPU."""

import math
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from moe_optim.kernels import newton_schulz_kernel, plan, products
from moe_optim.kernels.newton_schulz import NewtonSchulz, scratch_numel
from moe_optim.kernels.products import evaluate, multiply
from moe_optim.kernels.tuning import ProductTile
from tests.support.bytes import assert_bytes_equal
from tests.support.interpreter import interpret
from tests.support.newton_schulz import (
    DEEPSEEK,
    QUINTIC,
    distance,
    iterate,
    iterate_exactly,
    orthogonalize,
    random_matrices,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = ((1, 1, 1), (3, 5, 7), (2, 64, 96), (2, 96, 64), (3, 128, 40), (1, 33, 33))
WIDE_TILE = ProductTile(rows=16, cols=32, inner=16, num_warps=1, num_stages=1)
SQUARE_TILE = ProductTile(rows=16, cols=16, inner=16, num_warps=1, num_stages=1)
SIDES = st.integers(1, 6).map(lambda count: 8 * count)


@pytest.fixture
def launches(monkeypatch):
    """Have plans take kernels that the interpreter runs, in small tiles; their names."""
    monkeypatch.setattr(products, "is_hopper", lambda device: True)
    monkeypatch.setattr(products, "count_multiprocessors", lambda device: 3)
    monkeypatch.setattr(products, "PRODUCT_TILES", {True: WIDE_TILE, False: WIDE_TILE})
    monkeypatch.setattr(products, "POLYNOMIAL_TILE", SQUARE_TILE)
    monkeypatch.setattr(plan, "runs_triton", lambda device: True)
    return interpret(monkeypatch, newton_schulz_kernel)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_reference_is_the_batched_iteration_of_emerging_optimizers_to_the_bit(dtype, shape):
    x = random_matrices(shape, dtype)
    for coefficients in (QUINTIC[:2], QUINTIC):
        built, got = orthogonalize(x.clone(), coefficients)
        assert built.x.shape == built.result.shape and built.result.is_contiguous()
        assert_bytes_equal(got, iterate(x, coefficients))


@pytest.mark.parametrize("shape", [(2, 24, 40), (2, 40, 24), (2, 32, 32)], ids=str)
@pytest.mark.parametrize("transpose", [False, True])
def test_either_side_is_contracted_where_asked(shape, transpose):
    x = random_matrices(shape, torch.float32)
    _, got = orthogonalize(x.clone(), QUINTIC, transpose=transpose)
    assert_bytes_equal(got, iterate(x, QUINTIC, transpose=transpose))
    assert distance(got, iterate_exactly(x, QUINTIC)) < 2e-5


@pytest.mark.parametrize("shape", [(2, 24, 40), (2, 40, 24), (1, 32, 32)], ids=str)
def test_the_gram_form_is_the_iteration_in_exact_arithmetic(shape):
    """For every number of steps, with none to three restarts."""
    x = random_matrices(shape, torch.float32)
    for num_steps in range(1, 10):
        coefficients = DEEPSEEK[:num_steps]
        _, got = orthogonalize(x.clone(), coefficients, form="gram")
        assert distance(got, iterate_exactly(x, coefficients)) < 1e-4


@pytest.mark.parametrize("shape", [(2, 24, 40), (2, 40, 24)], ids=str)
def test_slices_whose_gram_matrices_are_summed_iterate_as_the_whole(shape):
    """Cut in two along the longer side, one step after another, as tensor parallelism does."""
    x = random_matrices(shape, torch.float32)
    axis = 1 if shape[1] > shape[2] else 2
    halves = [half.contiguous() for half in x.chunk(2, axis)]
    for step in QUINTIC:
        grams = [half.mT @ half if axis == 1 else half @ half.mT for half in halves]
        halves = [
            orthogonalize(half, [step], transpose=axis == 1, reduce=partial(sum_grams, grams))[1]
            for half in halves
        ]
    assert distance(torch.cat(halves, axis), iterate_exactly(x, QUINTIC)) < 2e-5


def sum_grams(grams, gram):
    """Stand for an all-reduce: one of the matrices is that of this rank."""
    assert any(torch.equal(gram, one) for one in grams)
    gram.copy_(sum(grams))


def whole_numbers(*shape, seed=0, low=-2, high=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, generator=generator).half()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=5)
@given(batch=st.integers(1, 3), rows=SIDES, cols=SIDES, is_tall=st.booleans())
@example(batch=2, rows=72, cols=8, is_tall=False)
def test_products_of_whole_numbers_are_exact(launches, batch, rows, cols, is_tall):
    """Tiles that stick out of the matrix, several per program; neighbours stay as they are."""
    x = whole_numbers(batch, rows, cols)
    wide = x.mT if is_tall else x
    side = wide.shape[1]
    gram, factor = (torch.full((batch, side, side), math.nan).half() for _ in range(2))
    out = torch.full_like(x, math.nan)
    multiply(wide, wide.mT, gram, kernels=True, is_symmetric=True)()
    evaluate(gram, factor, (3.0, -0.5, 2.0**-12), kernels=True)()
    multiply(gram, wide, out.mT if is_tall else out, kernels=True)()
    exact = wide.double() @ wide.double().mT
    assert_bytes_equal(gram, exact.half(), what="gram")
    want = 3.0 * torch.eye(side) - 0.5 * exact + 2.0**-12 * exact @ exact
    assert_bytes_equal(factor, want.half(), what="polynomial")
    want = exact @ wide.double()
    assert_bytes_equal(out, (want.mT if is_tall else want).half(), what="product")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=5)
@given(side=SIDES, seed=st.integers(0, 9))
def test_symmetric_products_are_mirrored_where_factors_do_not_commute(launches, side, seed):
    """The upper triangle is that of the transposed product."""
    left, right = (whole_numbers(2, side, side, seed=one) for one in (seed, seed + 10))
    left, right = left + left.mT, right + right.mT
    out = torch.full_like(left, math.nan)
    multiply(left, right, out, kernels=True, is_symmetric=True)()
    lower = (left.double() @ right.double()).tril()
    assert_bytes_equal(out, (lower + lower.tril(-1).mT).half())


@pytest.mark.parametrize(
    ("shape", "form"),
    [((2, 24, 72), "plain"), ((2, 72, 24), "gram"), ((1, 40, 56), "plain")],
    ids=str,
)
def test_kernels_iterate(launches, shape, form):
    """A step takes three launches; the interpreter's sums differ from a GPU's."""
    x = random_matrices(shape, torch.float16)
    built, got = orthogonalize(x.clone(), QUINTIC, form=form)
    assert len(launches) == len(built.calls) == {"plain": 15, "gram": 18}[form]
    assert built.kernels == built.calls
    assert distance(got, iterate_exactly(x, QUINTIC)) < 4e-3


@pytest.mark.parametrize(
    "change",
    [
        {"shape": (2, 24, 20)},
        {"dtype": torch.float32},
        {"coefficients": [(1.5, -0.5, 0.0)]},
        {"backend": "reference"},
    ],
    ids=str,
)
def test_what_kernels_do_not_serve_goes_to_torch(launches, change):
    given = {"shape": (2, 24, 40), "dtype": torch.float16, "coefficients": QUINTIC} | change
    x = random_matrices(given.pop("shape"), given.pop("dtype"))
    coefficients = given.pop("coefficients")
    built, got = orthogonalize(x.clone(), coefficients, **given)
    assert not built.kernels and not launches
    assert_bytes_equal(got, iterate(x, coefficients))


@pytest.mark.parametrize("beside", ["x", "scratch"])
def test_memory_that_tma_cannot_read_goes_to_torch(launches, beside):
    x = random_matrices((2, 24, 40), torch.float16)
    numel = scratch_numel(2, 24, 40, form="plain")
    offsets = {name: int(name == beside) for name in ("x", "scratch")}
    memory = torch.zeros(x.numel() + 1, dtype=x.dtype)[offsets["x"] :][: x.numel()].view(x.shape)
    scratch = torch.zeros(numel + 1, dtype=x.dtype)[offsets["scratch"] :]
    built = NewtonSchulz.build(memory.copy_(x), scratch, coefficients=QUINTIC)
    built.launch()
    assert not built.kernels
    assert_bytes_equal(built.result.clone(), iterate(x, QUINTIC))


def test_a_plan_iterates_whatever_x_holds_at_launch():
    built, _ = orthogonalize(random_matrices((2, 24, 40), torch.float32), QUINTIC[:3])
    other = random_matrices((2, 24, 40), torch.float32, seed=1)
    built.x.copy_(other)
    built.launch()
    assert_bytes_equal(built.result.clone(), iterate(other, QUINTIC[:3]))
