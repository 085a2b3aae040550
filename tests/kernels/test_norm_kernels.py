"""The launch that finds the norm of gradients, without a GPU."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def interpreted():
    """Return what the kernels did in one process of their own."""
    return subprocess.run(
        [sys.executable, "-m", "tests.kernels.interpreted_norm"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize(
    "what", ["sizes", "offsets", "wide values", "special values", "what is not there"]
)
def test_sums_and_zeros_are_the_references(what, interpreted):
    """Of whole numbers to the bit, of others as fp32; NaN lies around all gradients."""
    said = interpreted.stdout.splitlines()
    assert f"{what}: the reference's" in said, interpreted.stderr
