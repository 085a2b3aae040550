"""The launch that finds the amax of experts of any format, without a GPU."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from moe_optim.errors import LayoutError
from moe_optim.formats import MXFP8, QuantizedWeight
from moe_optim.kernels.amax_table import AmaxTable
from moe_optim.kernels.table_entry import TableEntry

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
def test_every_amax_is_plain_torchs():
    """Whole weights and ranges of them, experts in one part and in many, special values, weights of
    which nothing is owned, and a table that owns nothing; again without building."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.interpreted_amax"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "every amax is plain torch's" in done.stdout


def test_sources_of_two_dtypes_are_refused():
    entries = [
        TableEntry(
            parameter="fc",
            source=torch.zeros((1, 32, 32), dtype=dtype),
            target=QuantizedWeight.empty(MXFP8, (1, 32, 32)),
        )
        for dtype in (torch.float32, torch.bfloat16)
    ]
    with pytest.raises(LayoutError, match=r"one dtype, got torch.bfloat16, torch.float32"):
        AmaxTable.build(entries)
