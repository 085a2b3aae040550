"""MXFP8 with square blocks: Megatron's recipe, changed in this one point and only where wanted."""

from dataclasses import dataclass, replace

import pytest
from megatron.core import fp8_utils

from moe_optim import MoEOptimConfig
from moe_optim.megatron.te import recipe as te_recipe


@dataclass
class MXFP8BlockScaling:
    """What Transformer Engine's recipe has of what is read or changed."""

    fp8_dpa: bool = True
    enable_2d_quantization: bool = False

    def mxfp8(self) -> bool:
        return True


@dataclass
class Float8BlockScaling:
    fp8_dpa: bool = True

    def mxfp8(self) -> bool:
        return False


@pytest.mark.parametrize(
    ("recipe", "wanted", "changed"),
    [
        (MXFP8BlockScaling(), "mxfp8_2d", True),
        (MXFP8BlockScaling(), "mxfp8", False),
        (MXFP8BlockScaling(), None, False),
        (Float8BlockScaling(), "mxfp8_2d", False),
        (None, "mxfp8_2d", False),
    ],
)
def test_square_blocks_are_asked_for_where_the_format_wants_them(
    recipe, wanted, changed, monkeypatch
):
    """Without Transformer Engine Megatron's function returns None, and so does ours."""
    config = None if wanted is None else MoEOptimConfig(format=wanted)
    monkeypatch.setattr(te_recipe, "installed_config", lambda: config)
    monkeypatch.setattr(fp8_utils, "get_fp8_recipe", lambda config: recipe)
    want = replace(recipe, enable_2d_quantization=True) if changed else recipe
    assert te_recipe.get_fp8_recipe(object()) == want
