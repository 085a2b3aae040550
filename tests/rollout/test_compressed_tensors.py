"""compressed-tensors itself parses and decompresses what is exported in its convention."""

import pytest

from moe_optim.rollout.conventions import CONVENTIONS, ONE_SCALE
from tools.upstream.engine_loaders import decompressed_differences

OWN = [one for one in (*CONVENTIONS, ONE_SCALE) if one.name == "compressed_tensors"]


@pytest.mark.parametrize("convention", OWN, ids=lambda one: one.format)
def test_it_decompresses_the_values_of_training(convention):
    """To the bit, as the `quantization_config` says; of NVFP4 for the amaxes at hand, since a few
    cannot be written that way (`test_conventions.py` counts them)."""
    assert list(decompressed_differences(convention)) == []
