"""Exported experts are named, typed and scaled as engines read them, and mean what training reads.

The oracle is what engines do with what they load, restated in ``tests/support/modules/serving.py``.
"""

import pytest
import torch

from moe_optim import ops
from moe_optim.commands.export.engine_config import quantization_config
from moe_optim.formats import FORMATS, NVFP4
from moe_optim.formats.reference.scales import global_encode_scale
from moe_optim.rollout.conventions import (
    CONVENTIONS,
    ENGINE_FORMATS,
    ONE_SCALE,
    find_convention,
)
from moe_optim.rollout.expert_tensors import (
    RowSplit,
    each_expert,
    export_experts,
    stack_experts,
)
from tests.support.bytes import assert_bytes_equal
from tests.support.checkpoints.stored_checkpoints import interleaved
from tests.support.modules import serving

ROWS, COLS, EXPERTS = 512, 256, 2
CASES = [
    pytest.param(name, one, id=f"{name}-{one.name}")
    for name in FORMATS
    for one in CONVENTIONS
    if one.format == ENGINE_FORMATS[name]
]


def wide_weights(seed=0):
    """Return values of magnitudes that differ from block to block, and a block of zeros."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn((EXPERTS, ROWS, COLS), generator=generator)
    runs = torch.randint(-20, 8, (EXPERTS, ROWS // 16, COLS // 16), generator=generator)
    exponents = runs.repeat_interleave(16, 1).repeat_interleave(16, 2)
    weights = torch.ldexp(weights, exponents)
    weights[0, :128, :128] = 0
    weights[:, 300, 200] = 1.5 * 2.0**8  # the amax of both experts
    return weights


@pytest.mark.parametrize(("format", "convention"), CASES)
def test_what_an_engine_dequantizes_is_what_training_multiplies(format, convention):
    """To the bit, of gate, up and a whole linear alike."""
    quantized = ops.quantize(wide_weights(), format)
    wanted = ops.dequantize(quantized)
    wholes, halves = (export_experts(quantized, convention, parts=parts) for parts in (1, 2))
    assert len(wholes) == len(halves) == len(wanted) > 1
    for expert, (whole,) in enumerate(wholes):
        assert_bytes_equal(serving.dequantize(whole), wanted[expert], what="all rows")
    for expert, (gate, up) in enumerate(halves):
        got = torch.cat([serving.dequantize(gate), serving.dequantize(up)])
        assert_bytes_equal(got, wanted[expert], what="gate and up")


E4M3, U8, F32 = torch.float8_e4m3fn, torch.uint8, torch.float32
WEIGHT, MXFP8_SCALE = ((256, 256), E4M3), ((256, 8), U8)
PACKED, NVFP4_SCALE = ((256, 128), U8), ((256, 16), E4M3)
INT4 = {"weight_packed": ((256, 32), torch.int32), "weight_shape": ((2,), torch.int64)}
SHAPES = {  # what replaces `weight` in a name: shape and dtype, of [256, 256]
    ("mxfp8", "compressed_tensors"): {"weight": WEIGHT, "weight_scale": MXFP8_SCALE},
    ("mxfp8", "modelopt"): {"weight": WEIGHT, "weight_scale": MXFP8_SCALE},
    ("mxfp8", "deepseek"): {"weight": WEIGHT, "weight_scale_inv": MXFP8_SCALE},
    ("nvfp4", "modelopt"): {
        "weight": PACKED,
        "weight_scale": NVFP4_SCALE,
        "weight_scale_2": ((), F32),
    },
    ("nvfp4", "compressed_tensors"): {
        "weight_packed": PACKED,
        "weight_scale": NVFP4_SCALE,
        "weight_global_scale": ((1,), F32),
    },
    ("mxfp4", "compressed_tensors"): {"weight_packed": PACKED, "weight_scale": MXFP8_SCALE},
    ("int4", "compressed_tensors"): INT4 | {"weight_scale": ((256, 8), torch.bfloat16)},
    ("int4_g128", "compressed_tensors"): INT4 | {"weight_scale": ((256, 2), torch.bfloat16)},
    ("fp8_block", "deepseek"): {"weight": WEIGHT, "weight_scale_inv": ((2, 2), F32)},
    ("fp8_block", "compressed_tensors"): {"weight": WEIGHT, "weight_scale": ((2, 2), F32)},
}


@pytest.mark.parametrize(("format", "convention"), CASES)
def test_names_shapes_and_dtypes_are_those_that_engines_allocate(format, convention):
    quantized = ops.quantize(wide_weights(), format)
    gate, up = export_experts(quantized, convention, parts=2)[0]
    for part in (gate, up):
        got = {name: (tuple(one.shape), one.dtype) for name, one in part.items()}
        assert got == SHAPES[convention.format, convention.name]
        assert "weight_shape" not in part or part["weight_shape"].tolist() == [256, 256]


# Which bits a global scale of NVFP4 gives

SCALES = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float().view(1, -1, 1)
ELEMENTS = torch.tensor([0.5, 1, 1.5, 2, 3, 4, 6]).view(1, 1, -1)
ORDERS = {
    "elements and scales first": lambda amax: (ELEMENTS * SCALES) * _scale_2(amax),
    "scales first": lambda amax: ELEMENTS * (SCALES * _scale_2(amax)),
    "divided scales first": lambda amax: ELEMENTS * (SCALES / global_encode_scale(amax)),
}


def _scale_2(amax):
    return torch.div(amax, torch.full_like(amax, 2688.0))


def _mantissas_that_differ(amaxes, order):
    """Return of every amax whether some scale and element give other bits than in training."""
    amaxes = amaxes.view(-1, 1, 1)
    trained = (ELEMENTS * ((SCALES * amaxes) * (1.0 / 2688))).bfloat16()
    differs = (order(amaxes).bfloat16() != trained).flatten(1).any(1)
    return set((amaxes.flatten()[differs].view(torch.int32) >> 16 & 0x7F).tolist())


def test_the_global_scale_of_modelopt_gives_the_bits_of_training_for_every_amax():
    """An amax is a bf16 number: all of them from 2^-12 to 2^12, all scales, all elements.

    Products take elements times scales first, which is exact, and the global scale last. Who
    multiplies both scales first rounds once more, and who divides again: elements that lie half
    way between two bf16 numbers may then come out as the other one, with 2 of 128 mantissas of an
    amax each. Compressed-tensors has no global scale that would not do so.
    """
    bits = torch.arange((127 - 12) << 7, (127 + 12) << 7, dtype=torch.int32) << 16
    found = {}
    for name, order in ORDERS.items():
        parts = [
            _mantissas_that_differ(part, order) for part in bits.view(torch.float32).split(512)
        ]
        found[name] = set().union(*parts)
    assert found == {
        "elements and scales first": set(),
        "scales first": {0x2F, 0x75},
        "divided scales first": {0x13, 0x75},
    }


@pytest.mark.parametrize("name", ["modelopt", "compressed_tensors"])
@pytest.mark.parametrize("exponent", [-126, -125, -120, -118, -117, -116, -115])
def test_engines_get_tiny_experts_as_they_were_encoded(name, exponent):
    """Powers of two: what modelopt multiplies by is exact, and so is what others divide by.

    From 2^-117 down, 2688 / amax is more than fp32 holds.
    """
    weight = torch.full((1, 32, 32), 2.0**exponent)
    weight[0, :, 16:] *= 0.5
    quantized = ops.quantize(weight, NVFP4)
    (whole,) = export_experts(quantized, find_convention(NVFP4, name))[0]
    assert_bytes_equal(serving.dequantize(whole), ops.dequantize(quantized)[0])


def test_an_expert_of_zeros_has_finite_scales_and_gives_zeros():
    quantized = ops.quantize(torch.zeros(1, 32, 32), NVFP4)
    for name in ("modelopt", "compressed_tensors"):
        (whole,) = export_experts(quantized, find_convention(NVFP4, name))[0]
        assert all(bool(tensor.float().isfinite().all()) for tensor in whole.values())
        assert not serving.dequantize(whole).any()


@pytest.mark.parametrize("interleave", [None, 32])
def test_each_row_of_an_expert_with_one_scale_gets_it(interleave):
    """Gate and up apart, however their rows lie; elements are those of training."""
    codes = torch.randint(0, 256, (128, 16), dtype=torch.uint8)
    gate, up = codes.chunk(2)
    stored = codes if interleave is None else interleaved(codes, interleave)
    scale_inv = torch.tensor([0.75])
    split = RowSplit(parts=2, interleave=interleave)
    stacked = stack_experts([stored[None], scale_inv], "tensorwise", ONE_SCALE, split)
    (parts,) = each_expert(stacked)
    for part, rows in zip(parts, (gate, up), strict=True):
        assert part.keys() == {"weight", "weight_scale"}
        assert_bytes_equal(part["weight"].view(torch.uint8), rows)
        assert part["weight"].dtype == ONE_SCALE.data_dtype
        assert_bytes_equal(part["weight_scale"], torch.full((64, 1), 0.75))
        assert part["weight_scale"].is_contiguous()


# What engines read in config.json

DENSE = ["lm_head", "model.layers.0.mlp.gate", "model.layers.0.self_attn.q_proj"]


def test_each_convention_is_configured_as_its_engines_parse_it():
    """What compressed-tensors itself parses is in ``test_compressed_tensors.py``."""
    made = {(c.format, c.name): quantization_config(c, DENSE) for c in CONVENTIONS}
    assert made["fp8_block", "deepseek"] == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": DENSE,
    }
    assert made["mxfp8", "deepseek"]["quant_method"] == "mxfp8"
    assert made["mxfp8", "deepseek"]["weight_block_size"] == [1, 32]
    four_bits = made["nvfp4", "modelopt"]
    assert (four_bits["quant_method"], four_bits["quant_algo"]) == ("modelopt", "W4A16_NVFP4")
    assert (four_bits["group_size"], four_bits["ignore"]) == (16, DENSE)
    assert made["mxfp8", "modelopt"]["quant_algo"] == "MXFP8"
    activations = {
        format: config["config_groups"]["group_0"]["input_activations"]
        for (format, name), config in made.items()
        if name == "compressed_tensors"
    }
    unquantized = {"mxfp4", "nvfp4", "int4", "int4_g128"}
    assert {format for format, one in activations.items() if one is None} == unquantized
    rows = quantization_config(ONE_SCALE, DENSE)["config_groups"]["group_0"]
    assert rows["weights"]["strategy"] == "channel" and not rows["weights"]["dynamic"]
    assert rows["input_activations"]["strategy"] == "token" and rows["input_activations"]["dynamic"]
