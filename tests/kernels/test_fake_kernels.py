"""The launches of fake quantization, without a GPU."""

from importlib.util import find_spec

import pytest

from tests.support.launches import interpreted


@pytest.fixture(scope="module")
def done():
    return interpreted("tests.kernels.interpreted_fake")


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize(
    "what", ["values", "grids", "scattered", "e4m3", "gradients", "amaxes", "tables"]
)
def test_values_and_gradients_are_the_references(what, done):
    """To the bit, rounding of integers included; E4M3 of values that need none."""
    assert f"{what}: the reference's" in done.stdout.splitlines(), done.stderr
