"""GPUs that are not at hand: kernels are compiled for them, and their PTX runs on the CPU."""

import pytest

from tests.support.ptx.launches import emulate

BLACKWELL, BLACKWELL_RTX, HOPPER = 100, 120, 90
GPUS = [
    pytest.param(BLACKWELL, id="sm_100"),
    pytest.param(BLACKWELL_RTX, id="sm_120", marks=pytest.mark.extended),
    pytest.param(HOPPER, id="sm_90", marks=pytest.mark.extended),
]


@pytest.fixture(params=GPUS)
def launches(request, monkeypatch):
    """Have launches run as on a GPU; the names of kernels, as they are launched."""
    return emulate(monkeypatch, request.param)
