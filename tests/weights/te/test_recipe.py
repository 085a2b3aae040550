"""MXFP8 with square blocks: Megatron's recipe, changed in this one point and only where wanted."""

import sys
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace

import pytest
from megatron.core import fp8_utils

from moe_optim import MoEOptimConfig
from moe_optim.errors import ConfigError, StateError
from moe_optim.formats import FORMATS, FP8_BLOCK, FP8_BLOCK_FP32, MXFP8, MXFP8_2D
from moe_optim.weights.te import recipe as te_recipe
from moe_optim.weights.te.fields import te_formats_of
from moe_optim.weights.te.recipe import make_quantizer
from moe_optim.weights.te.storage import TransformerEngineStorage
from tests.support.inputs import wide_range_weights
from tests.support.te.te_stand_ins import MXFP8Tensor


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


# Transformer Engine 2.17 and 2.18, whose MXFP8 has no square blocks


@dataclass
class OlderMXFP8BlockScaling:
    fp8_dpa: bool = True

    def mxfp8(self) -> bool:
        return True


class OlderMXFP8Quantizer:
    def __init__(self, fp8_dtype, *, rowwise=True, columnwise=True):
        self.usage = (rowwise, columnwise)


TOO_OLD = "format: mxfp8_2d: expected Transformer Engine 2.19 or newer, .* Install it, or set"


def test_square_blocks_are_refused_by_name_where_there_are_none(monkeypatch):
    monkeypatch.setattr(te_recipe, "installed_config", lambda: MoEOptimConfig(format="mxfp8_2d"))
    monkeypatch.setattr(fp8_utils, "get_fp8_recipe", lambda config: OlderMXFP8BlockScaling())
    with pytest.raises(ConfigError, match=TOO_OLD):
        te_recipe.get_fp8_recipe(object())


@pytest.fixture
def older_engine(monkeypatch):
    pytorch = ModuleType("transformer_engine.pytorch")
    pytorch.MXFP8Quantizer, pytorch.NVFP4Quantizer = OlderMXFP8Quantizer, object
    pytorch.Float8BlockQuantizer = Float8BlockQuantizer
    pytorch.DType = SimpleNamespace(kFloat8E4M3="e4m3")
    monkeypatch.setitem(sys.modules, "transformer_engine", ModuleType("transformer_engine"))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", pytorch)


def test_an_older_quantizer_is_made_for_rows_and_refused_for_square_blocks(older_engine):
    assert make_quantizer(MXFP8).usage == (True, True)
    with pytest.raises(ConfigError, match=TOO_OLD):
        make_quantizer(MXFP8_2D)


@pytest.mark.parametrize("name", [name for name, one in FORMATS.items() if one.is_row_only])
def test_formats_of_one_direction_have_no_class_of_transformer_engine(name):
    with pytest.raises(ConfigError, match=rf"got {name}\. Set storage: portable"):
        make_quantizer(FORMATS[name])


class Float8BlockQuantizer:
    def __init__(self, fp8_dtype, *, rowwise, columnwise, force_pow_2_scales, block_scaling_dim):
        self.given = (fp8_dtype, rowwise, columnwise, block_scaling_dim)
        self.force_pow_2_scales = force_pow_2_scales


@pytest.mark.parametrize("format", [FP8_BLOCK, FP8_BLOCK_FP32], ids=lambda format: format.name)
def test_a_quantizer_of_fp8_blocks_has_the_scales_of_its_format(format, older_engine):
    """And a weight of this quantizer the format again."""
    quantizer = make_quantizer(format)
    assert quantizer.given == ("e4m3", True, True, 2)
    assert te_formats_of(quantizer) == (format,)


def test_rows_of_an_older_quantizer_are_not_taken_for_square_blocks():
    weight = MXFP8Tensor(MXFP8, wide_range_weights(64, 64))
    weight._quantizer = OlderMXFP8Quantizer("e4m3")
    with pytest.raises(StateError, match=r"blocks of one row \(1-D\)"):
        TransformerEngineStorage(weight, MXFP8_2D, "weight")
