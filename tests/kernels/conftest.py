"""GPUs that are not at hand: kernels are compiled for them, and their PTX runs on the CPU."""

import pytest

from moe_optim.formats import FORMATS
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


@pytest.fixture(params=GPUS)
def launches(request, monkeypatch):
    """Have launches run as on a GPU; the names of kernels, as they are launched."""
    return emulate(monkeypatch, request.param)
