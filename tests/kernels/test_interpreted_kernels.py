"""The kernels without a GPU: indices, strides and masks. Their rounding is tested on a GPU."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from moe_optim.formats import FORMATS
from tests.support.launches import interpreted

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def done():
    return interpreted("tests.kernels.interpreted")


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize("format", FORMATS)
def test_every_byte_lands_where_the_reference_puts_it(format, done):
    """Whole and partial tiles in one launch, padded storage, zeroed sources and gaps, cut bands,
    parts of experts, columnwise copies and expanded scales; the same where masters take a step of
    Adam first."""
    said = done.stdout.splitlines()
    assert f"{format}: every byte is the reference's" in said, done.stderr


def test_operations_load_without_triton():
    """In a fresh interpreter: only a table on a GPU needs it."""
    program = "import sys, moe_optim, moe_optim.ops; print('triton' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
