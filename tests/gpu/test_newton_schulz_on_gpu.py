"""Batches of matrices are orthogonalized on a GPU."""

import math
from functools import partial

import pytest
import torch

from moe_optim.kernels import products
from moe_optim.kernels.products import evaluate, multiply
from tests.support.bytes import assert_bytes_equal
from tests.support.newton_schulz import (
    QUINTIC,
    distance,
    iterate,
    iterate_exactly,
    orthogonalize,
    random_matrices,
)

pytestmark = pytest.mark.gpu

SHAPES = (
    (3, 768, 2048),
    (3, 2048, 768),
    (2, 1536, 2048),
    (5, 200, 328),
    (2, 1000, 136),
    (4, 8, 24),
    (1, 264, 264),
    (1, 2304, 4096),
)
FORMS = (("plain", torch.bfloat16), ("plain", torch.float16), ("gram", torch.float16))
EACH_FORM = pytest.mark.parametrize(("form", "dtype"), FORMS)
EACH_SHAPE = pytest.mark.parametrize("shape", SHAPES, ids=str)


def on_hopper():
    return products.is_hopper(torch.device("cuda", torch.cuda.current_device()))


def matrices(shape, dtype, seed=0):
    return random_matrices(shape, dtype, device="cuda", seed=seed)


@EACH_FORM
@EACH_SHAPE
def test_results_lie_as_near_to_fp64_as_those_of_plain_torch(form, dtype, shape):
    """Nearer than 1.5 times the distance of the same iteration in torch.baddbmm.

    Square noise has singular values near 0, of which X X^T keeps less in the Gram form.
    """
    x = matrices(shape, dtype)
    want = iterate_exactly(x, QUINTIC)
    built, got = orthogonalize(x.clone(), form=form)
    assert bool(built.kernels) == on_hopper()
    room = 20 if form == "gram" and shape[1] == shape[2] else 2 if form == "gram" else 1.5
    assert distance(got, want) < room * distance(iterate(x, QUINTIC), want)


@EACH_FORM
@EACH_SHAPE
def test_a_matrix_has_the_same_result_alone_and_in_any_batch(form, dtype, shape):
    """Where kernels run: cuBLAS may choose another kernel for another batch."""
    if not on_hopper():
        pytest.skip("expected a GPU of compute capability 9.x")
    x = torch.cat([matrices(shape, dtype), matrices(shape, dtype, seed=1)])
    _, together = orthogonalize(x.clone(), form=form)
    _, again = orthogonalize(x.clone(), form=form)
    assert_bytes_equal(again, together, what="again")
    _, reversed_batch = orthogonalize(x.flip(0), form=form)
    assert_bytes_equal(reversed_batch.flip(0), together, what="reversed")
    for index in range(len(x)):
        _, alone = orthogonalize(x[index : index + 1].clone(), form=form)
        assert_bytes_equal(alone, together[index : index + 1], what=f"matrix {index}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@EACH_SHAPE
def test_symmetric_products_are_symmetric_to_the_bit(dtype, shape):
    """Also where the factors do not commute; each product is near to that in fp64.

    Rows have norm 1, so that fp16 holds all products as normal numbers.
    """
    if not on_hopper():
        pytest.skip("expected a GPU of compute capability 9.x")
    side = min(shape[1:])
    x = side**0.5 * matrices(shape, dtype)
    wide = x.mT if shape[1] > shape[2] else x
    gram, factor, twice = (
        torch.full((shape[0], side, side), math.nan, dtype=dtype, device="cuda") for _ in range(3)
    )
    multiply(wide, wide.mT, gram, kernels=True, is_symmetric=True)()
    evaluate(gram, factor, (4.0848, -6.8946, 0.0625), kernels=True)()
    other = gram.flip(1, 2).contiguous()
    multiply(factor, other, twice, kernels=True, is_symmetric=True)()
    exact = gram.double()
    eye = torch.eye(side, dtype=torch.float64, device="cuda")
    for what, got, want in (
        ("gram", gram, wide.double() @ wide.double().mT),
        ("polynomial", factor, 4.0848 * eye - 6.8946 * exact + 0.0625 * exact @ exact),
        (
            "product",
            twice,
            (product := (factor.double() @ other.double()).tril()) + product.tril(-1).mT,
        ),
    ):
        assert_bytes_equal(got, got.mT.contiguous(), what=what)
        assert distance(got, want) < torch.finfo(dtype).eps, what


@pytest.mark.parametrize("shape", [(2, 256, 512), (2, 512, 256)], ids=str)
def test_fp32_iterates_in_torch(shape):
    x = matrices(shape, torch.float32)
    built, got = orthogonalize(x.clone())
    assert not built.kernels
    assert_bytes_equal(got, iterate(x, QUINTIC))


def put_total(total, gram):
    """Stand for an all-reduce."""
    gram.copy_(total)


def test_ranks_sum_gram_matrices_between_launches():
    """Two halves, one step after another, are near to the whole."""
    x = matrices((3, 264, 512), torch.bfloat16)
    want = iterate_exactly(x, QUINTIC)
    halves = [half.contiguous() for half in x.chunk(2, 2)]
    for step in QUINTIC:
        total = sum(half.float() @ half.float().mT for half in halves).bfloat16()
        sum_grams = partial(put_total, total)
        halves = [
            orthogonalize(half, [step], transpose=False, reduce=sum_grams)[1] for half in halves
        ]
    whole = orthogonalize(x.clone())[1]
    assert distance(torch.cat(halves, 2), want) < 1.5 * distance(whole, want)
