"""The launch that finds the norm of gradients, without a GPU."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.launches import interpreted

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def done():
    return interpreted("tests.kernels.interpreted_norm")


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize(
    "what", ["sizes", "offsets", "wide values", "special values", "what is not there"]
)
def test_sums_and_zeros_are_the_references(what, done):
    """Of whole numbers to the bit, of others as fp32; NaN lies around all gradients."""
    said = done.stdout.splitlines()
    assert f"{what}: the reference's" in said, done.stderr
