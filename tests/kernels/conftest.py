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

ONE_OF_EACH_PATH = pytest.mark.parametrize(
    "format",
    [
        pytest.param(
            format, id=name, marks=[] if name in REPRESENTATIVE_FORMATS else [pytest.mark.extended]
        )
        for name, format in FORMATS.items()
    ],
)
"""Every format; those that share their code with another are extended."""

MORE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

STEPS_ALONG = pytest.mark.parametrize(
    ("format", "dtype"),
    [
        pytest.param(
            *(format, dtype),
            id=f"{name}, directions in {of}",
            marks=[]
            if format is MXFP8 or (of == "bf16" and name in REPRESENTATIVE_FORMATS)
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
