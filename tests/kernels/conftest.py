"""GPUs that are not at hand: kernels are compiled for them, and their PTX runs on the CPU."""

from itertools import product

import pytest
import torch

from moe_optim.formats import FORMATS, MXFP8
from tests.support.formats import REPRESENTATIVE_FORMATS
from tests.support.ptx.launches import emulate

BLACKWELL, BLACKWELL_RTX, HOPPER = 100, 120, 90
GPUS = [
    pytest.param(BLACKWELL, id="sm_100"),
    pytest.param(BLACKWELL_RTX, id="sm_120", marks=pytest.mark.extended),
    pytest.param(HOPPER, id="sm_90", marks=pytest.mark.extended),
]


def formats(every_time):
    """Have a test take every format; those that are not named are extended."""
    return pytest.mark.parametrize(
        "format",
        [
            pytest.param(one, id=name, marks=[pytest.mark.extended] * (name not in every_time))
            for name, one in FORMATS.items()
        ],
    )


ONE_OF_EACH_PATH = formats(REPRESENTATIVE_FORMATS)
ONE_OF_EACH_KERNEL = formats(("nvfp4", "fp8_block", "int4"))
"""Packed elements and an amax, large blocks that edges cut, and rows."""

MORE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

STEPS_ALONG = pytest.mark.parametrize(
    ("format", "dtype"),
    [
        pytest.param(
            *(format, dtype),
            id=f"{name}, directions in {of}",
            marks=[]
            if (of == "bf16" and name in REPRESENTATIVE_FORMATS) or (format, of) == (MXFP8, "fp16")
            else [pytest.mark.extended],
        )
        for (name, format), (of, dtype) in product(FORMATS.items(), MORE_DTYPES.items())
    ],
)
"""Every format with directions of every dtype; most are extended."""


@pytest.fixture(params=GPUS)
def launches(request, monkeypatch):
    """Have launches run as on a GPU; the names of kernels, as they are launched."""
    return emulate(monkeypatch, request.param)
