"""compressed-tensors itself parses and decompresses what is exported in its convention."""

import pytest

from moe_optim.formats import FORMATS, get_format
from moe_optim.rollout.conventions import ONE_SCALE, find_convention
from tools.upstream.engine_loaders import decompressed_differences

TENSORWISE = pytest.param(None, ONE_SCALE, id="per-tensor scaling")
OWN = [
    pytest.param(format, find_convention(get_format(format), "compressed_tensors"), id=format)
    for format in FORMATS
]


@pytest.mark.parametrize(("format", "convention"), [*OWN, TENSORWISE])
def test_it_decompresses_the_values_of_training(format, convention):
    """To the bit, as the `quantization_config` says; of NVFP4 for the amaxes at hand, since a few
    cannot be written that way (`test_conventions.py` counts them)."""
    assert list(decompressed_differences(convention, format)) == []
