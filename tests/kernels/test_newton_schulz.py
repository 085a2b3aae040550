"""The Newton-Schulz iteration over a batch of matrices, without a GPU."""

import pytest
import torch

from tests.support.bytes import assert_bytes_equal
from tests.support.newton_schulz import QUINTIC, iterate, orthogonalize, random_matrices

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = ((1, 1, 1), (3, 5, 7), (2, 64, 96), (2, 96, 64), (3, 128, 40), (1, 33, 33))
BOUNDS = {torch.bfloat16: 0.02, torch.float16: 0.003, torch.float32: 2e-5}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_the_reference_is_the_batched_iteration_of_emerging_optimizers_to_the_bit(
    dtype, shape, num_steps
):
    """Tall, wide and square; the result lies in x or in scratch."""
    x = random_matrices(shape, dtype)
    want = iterate(x, QUINTIC[:num_steps])
    built, got = orthogonalize(x.clone(), QUINTIC[:num_steps])
    assert built.result.shape == x.shape and built.result.is_contiguous()
    assert_bytes_equal(got, want)
