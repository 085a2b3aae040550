"""Weights that are published quantized become bf16: element times scale, rounded once, to the bit.

Each layout is written here as its publisher writes it, with random codes and scales. The oracle is
a table of elements and products in fp64; where the publisher's own code runs, it is a second one.
"""

import json

import pytest
import torch

from moe_optim.commands.cli import main as cli
from moe_optim.commands.conversion.model_conversion import plan_dequantization
from moe_optim.commands.conversion.model_sources import dequantized
from moe_optim.commands.conversion.opening import open_checkpoint
from moe_optim.commands.conversion.published_weights import encodings_of
from moe_optim.errors import ConfigError, LayoutError
from tests.support.bytes import assert_bytes_equal, assert_same_tensors, assert_values_equal
from tests.support.checkpoints.exported_models import export, in_files, stored, write
from tests.support.checkpoints.hf_checkpoints import write_hf, write_megatron
from tests.support.checkpoints.stored_checkpoints import read_with_torch
from tests.support.modules import serving

E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
E4M3 = torch.float8_e4m3fn


def drawn(low, high, *shape):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(sum(shape)))


def product(elements, scales):
    """Multiply elements [..., R, C] by the scale [..., R, n] of each run of columns."""
    runs = elements.double().unflatten(-1, (scales.shape[-1], -1))
    return (runs * scales.double().unsqueeze(-1)).flatten(-2).bfloat16()


def four_bits(*shape):
    """Return random codes, one per element, and bytes that hold two, the first in low bits."""
    codes = drawn(0, 16, *shape)
    return codes, (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8)


def exponents(*shape):
    """Return random bytes of E8M0, and the powers of two that they mean."""
    codes = drawn(100, 140, *shape)
    return codes.to(torch.uint8), torch.exp2(codes.double() - 127)


DENSE = {"model.norm.weight": torch.randn(64).bfloat16(), "lm_head.weight": torch.randn(8, 64)}


def gpt_oss():
    """transformers 5.24.0, ``integrations/mxfp4.py``, and openai/gpt-oss-20b's index: rows of gate
    and up alternate; in bf16 weights are [E, C, R]."""
    stored, values = dict(DENSE), dict(DENSE)
    for name, rows in (("gate_up_proj", 6), ("down_proj", 64)):
        stem = f"model.layers.0.mlp.experts.{name}"
        codes, packed = four_bits(2, rows, 64)
        scales, factors = exponents(2, rows, 2)
        stored[f"{stem}_blocks"] = packed.view(2, rows, 2, 16)
        stored[f"{stem}_scales"] = scales
        stored[f"{stem}_bias"] = values[f"{stem}_bias"] = torch.randn(2, rows).bfloat16()
        values[stem] = product(E2M1[codes], factors).transpose(1, 2).contiguous()
    return stored, values, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def deepseek_v4():
    """vLLM 0.33.0, ``models/deepseek_v4``, maps these names: FP4 experts beside FP8 blocks."""
    stored, values = dict(DENSE), dict(DENSE)
    for name in ("w1", "w2", "w3"):
        stem = f"layers.0.ffn.experts.3.{name}"
        codes, packed = four_bits(8, 64)
        scales, factors = exponents(8, 2)
        stored[f"{stem}.weight"] = packed.view(torch.int8)
        stored[f"{stem}.scale"] = scales.view(torch.float8_e8m0fnu)
        values[f"{stem}.weight"] = product(E2M1[codes], factors)
    codes = drawn(0, 127, 130, 96).to(torch.uint8).view(E4M3)
    scales, factors = exponents(2, 1)
    stored["layers.0.attn.wkv.weight"] = codes
    stored["layers.0.attn.wkv.scale"] = scales.view(torch.float8_e8m0fnu)
    spread = factors.repeat_interleave(128, 0)[:130]
    values["layers.0.attn.wkv.weight"] = product(codes.float(), spread)
    stored["layers.0.hc_attn_scale"] = values["layers.0.hc_attn_scale"] = torch.randn(3)
    said = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0"}
    return stored, values, said | {"weight_block_size": [128, 128]}


def fp8_blocks(ue8m0=False):
    """DeepSeek-V3's ``inference/fp8_cast_bf16.py``: whole blocks, and blocks that the edge cuts.

    Among the elements are all 256, NaN included. Scales are of all magnitudes and no powers of two,
    or bare exponents, as ``scale_fmt: ue8m0`` has them: code n means 2^(n - 127), 255 NaN.
    """
    stored, values = dict(DENSE), dict(DENSE)
    for name, (rows, cols) in {"gate": (16, 12), "up": (20, 10), "down": (12, 16)}.items():
        stem = f"model.layers.1.mlp.experts.2.{name}_proj.weight"
        counts = -(-rows // 8), -(-cols // 4)
        codes = drawn(0, 256, rows, cols).to(torch.uint8).view(E4M3)
        factors = torch.ldexp(torch.rand(counts) + 0.5, drawn(-12, 3, *counts)).float()
        scales = factors
        if ue8m0:
            exponent = drawn(0, 256, *counts).flatten()
            exponent[:4] = torch.tensor([0, 1, 254, 255])
            factors = torch.exp2(exponent.double() - 127).masked_fill(exponent == 255, torch.nan)
            factors = factors.view(counts)
            scales = exponent.to(torch.uint8).view(counts).view(torch.float8_e8m0fnu)
        stored[stem], stored[f"{stem}_scale_inv"] = codes, scales
        whole = factors.repeat_interleave(8, 0).repeat_interleave(4, 1)[:rows, :cols]
        values[stem] = (codes.double() * whole.double()).float().bfloat16()
    said = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [8, 4]}
    return stored, values, said


def group(**weights):
    common = {"num_bits": 4, "strategy": "group", "symmetric": True, "dynamic": False}
    return {
        "targets": ["Linear"],
        "format": None,
        "weights": common | {"group_size": 32, "actorder": None} | weights,
        "input_activations": None,
    }


def compressed(format, **weights):
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group(**weights)},
        "ignore": ["lm_head"],
    }


def kimi_int4(size=32):
    """compressed-tensors 0.20.0, ``compressors/pack_quantized``: 8 nibbles per word, each 8 above
    its integer, the first in the lowest bits."""
    stored, values = dict(DENSE), dict(DENSE)
    for name in ("gate_proj", "up_proj", "down_proj"):
        stem = f"language_model.model.layers.1.mlp.experts.0.{name}"
        codes = drawn(0, 16, 8, 256)
        words = (codes.view(8, 32, 8) << torch.arange(0, 32, 4)).sum(-1)
        scales = torch.ldexp(torch.rand(8, 256 // size) + 0.5, drawn(-12, 3, 8, 256 // size))
        stored[f"{stem}.weight_packed"] = (words - (words >> 31 << 32)).to(torch.int32)
        stored[f"{stem}.weight_scale"] = scales.bfloat16()
        stored[f"{stem}.weight_shape"] = torch.tensor([8, 256])
        values[f"{stem}.weight"] = product(codes - 8, scales.bfloat16())
    return stored, values, compressed("pack-quantized", type="int", group_size=size)


def kimi_mxfp4():
    """compressed-tensors 0.20.0, ``compressors/mxfp4``."""
    stored, values = dict(DENSE), dict(DENSE)
    for name in ("gate_proj", "up_proj", "down_proj"):
        stem = f"model.layers.1.mlp.experts.0.{name}"
        codes, packed = four_bits(8, 64)
        scales, factors = exponents(8, 2)
        stored[f"{stem}.weight_packed"] = packed
        stored[f"{stem}.weight_scale"] = scales
        values[f"{stem}.weight"] = product(E2M1[codes], factors)
    return stored, values, compressed("mxfp4-pack-quantized", type="float")


LAYOUTS = {
    "DeepSeek-V3": fp8_blocks,
    "DeepSeek-V3, exponents": lambda: fp8_blocks(ue8m0=True),
    "gpt-oss": gpt_oss,
    "DeepSeek-V4": deepseek_v4,
    "Kimi, INT4": kimi_int4,
    "INT4 in groups of 128": lambda: kimi_int4(128),
    "Kimi, MXFP4": kimi_mxfp4,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_elements_times_scales_are_written_under_the_names_of_bf16(layout, tmp_path, capsys):
    """And every other tensor as it is; the configuration no longer speaks of quantization. One
    index of the first axis is read alone."""
    stored, values, quantization = LAYOUTS[layout]()
    config = {"model_type": "any", "expert_dtype": "fp4", "quantization_config": quantization}
    source = write_hf(tmp_path / "published", stored, config)
    (source / "tokenizer.json").write_text("{}")
    assert cli.main(["convert", str(source), str(tmp_path / "out"), "--to", "hf"]) == 0
    assert "quantized weights in bf16" in capsys.readouterr().out
    got = in_files(tmp_path / "out")
    assert got.keys() == values.keys()
    for name, want in values.items():
        assert_values_equal(got[name], want, what=name)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"model_type": "any"}
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    reader = dequantized(open_checkpoint(source))
    for name, want in values.items():
        info = reader.tensors[name]
        assert (info.shape, info.dtype) == (tuple(want.shape), want.dtype)
        assert_values_equal(reader.read(name, 1), want[1], what=name)


def test_megatron_gets_what_it_gets_of_the_same_model_in_bf16(tmp_path):
    """Of FP8 blocks that transformers has under the names of bf16 weights."""
    source = write_megatron(tmp_path / "c", "deepseek_v3")
    assert cli.main(["convert", str(source), str(tmp_path / "hf"), "--to", "hf"]) == 0
    tensors = in_files(tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    for name in [name for name in tensors if ".experts." in name or "self_attn.o_proj" in name]:
        values = torch.ldexp(tensors[name].float(), torch.tensor(8)).clamp(-400, 400).to(E4M3)
        tensors[name], tensors[f"{name}_scale_inv"] = values, torch.full((1, 1), 0.375)
    said = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    write_hf(tmp_path / "fp8", tensors, config | {"quantization_config": said})
    for name, to in (("fp8", "hf"), ("fp8", "megatron"), ("fp8 hf", "megatron")):
        words = [str(tmp_path / name), str(tmp_path / f"{name} {to}"), "--to", to]
        assert cli.main(["convert", *words]) == 0
    got, want = (
        read_with_torch(open_checkpoint(tmp_path / f"{name} megatron").path)
        for name in ("fp8", "fp8 hf")
    )
    assert_same_tensors(got, want)


def test_the_configuration_may_lie_in_that_of_the_language_model(tmp_path):
    """As Kimi K2.5's and K3's."""
    stored, values, quantization = kimi_int4()
    config = {"text_config": {"hidden_size": 64, "quantization_config": quantization}}
    source = write_hf(tmp_path / "published", stored, config)
    plan_dequantization(open_checkpoint(source)).write(tmp_path / "out")
    assert_same_tensors(in_files(tmp_path / "out"), values)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written == {"text_config": {"hidden_size": 64}}


def test_transformers_reads_the_same_values_of_gpt_oss():
    module = pytest.importorskip("transformers.integrations.mxfp4")
    stored, values, _ = gpt_oss()
    for name in ("gate_up_proj", "down_proj"):
        stem = f"model.layers.0.mlp.experts.{name}"
        blocks, scales = stored[f"{stem}_blocks"], stored[f"{stem}_scales"]
        got = module.convert_moe_packed_tensors(blocks, scales)
        assert_bytes_equal(got, values[stem])


@pytest.mark.parametrize("layout", ["Kimi, INT4", "INT4 in groups of 128", "Kimi, MXFP4"])
def test_compressed_tensors_reads_the_same_values(layout):
    compressors = pytest.importorskip("compressed_tensors.compressors")
    from compressed_tensors.quantization import QuantizationConfig

    stored, values, quantization = LAYOUTS[layout]()
    config = QuantizationConfig.model_validate(quantization)
    compressor = compressors.BaseCompressor.get_value_from_registry(config.format)
    for name in values.keys() - DENSE.keys():
        stem = name.removesuffix("weight")
        tensors = {k.removeprefix(stem): one for k, one in stored.items() if k.startswith(stem)}
        got = compressor.decompress(tensors, config.config_groups["group_0"])["weight"]
        assert_bytes_equal(got.bfloat16(), values[name])


@pytest.mark.parametrize("format", ["mxfp4", "int4_g128"])
def test_exported_experts_come_back_as_training_multiplies_them(format, tmp_path):
    source = write(tmp_path / "source", stored())
    exported = export(source, tmp_path / "exported", format)
    tensors = in_files(exported)
    stems = {key.rpartition(".")[0] for key in tensors if key.endswith("weight_packed")}
    wanted = {key: one for key, one in tensors.items() if key.rpartition(".")[0] not in stems}
    for stem in stems:
        parts = ("weight_packed", "weight_scale", "weight_shape")
        of_expert = {name: tensors[key] for name in parts if (key := f"{stem}.{name}") in tensors}
        wanted[f"{stem}.weight"] = serving.dequantize(of_expert)
    assert cli.main(["convert", str(exported), str(tmp_path / "hf"), "--to", "hf"]) == 0
    assert_same_tensors(in_files(tmp_path / "hf"), wanted)


# What is refused, with nothing written

INT = "language_model.model.layers.1.mlp.experts.0.up_proj"
OSS = "model.layers.0.mlp.experts.down_proj"
V4 = "layers.0.ffn.experts.3.w2"
U8 = torch.uint8
FP8 = "model.layers.1.mlp.experts.2.gate_proj.weight"
FAULTS = {
    "no scales of FP8": (
        fp8_blocks, f"{FP8}_scale_inv", None, f"{FP8}_scale_inv: missing",
    ),
    "scales of other blocks": (
        fp8_blocks, f"{FP8}_scale_inv", torch.ones(3, 3),
        f"{FP8}_scale_inv: expected float32, bfloat16, float16 or float8_e8m0fnu [2, 3] for "
        "[16, 12], got float32 [3, 3]",
    ),
    "no elements": (
        kimi_int4, f"{INT}.weight_packed", None, f"{INT}.weight_scale: left over",
    ),
    "zero points": (
        kimi_int4, f"{INT}.weight_zero_point", torch.zeros(1, 8, dtype=torch.int32),
        f"{INT}.weight_zero_point: not supported",
    ),
    "blocks of one expert": (
        gpt_oss, f"{OSS}_blocks", torch.ones(64, 2, 16, dtype=U8),
        f"{OSS}_blocks: expected [experts, rows, blocks, bytes] of uint8, got uint8 [64, 2, 16]",
    ),
    "scales of a wrong dtype": (
        deepseek_v4, f"{V4}.scale", torch.ones(8, 2),
        f"{V4}.scale: expected float8_e8m0fnu or uint8 [8, 2] for [8, 32], got float32 [8, 2]",
    ),
}  # fmt: skip


def test_what_does_not_fit_is_named(tmp_path):
    for fault, (layout, name, other, said) in FAULTS.items():
        stored, _, quantization = layout()
        stored.pop(name, None)
        if other is not None:
            stored[name] = other
        source = write_hf(tmp_path / fault, stored, {"quantization_config": quantization})
        with pytest.raises(LayoutError) as error:
            plan_dequantization(open_checkpoint(source))
        assert said in str(error.value), fault


QUANTIZATION = fp8_blocks()[2]
OTHERS = {
    "elements of another kind": QUANTIZATION | {"fmt": "e5m2"},
    "integers without symmetry": compressed("pack-quantized", type="int", symmetric=False),
    "an order of columns": compressed("pack-quantized", type="int", actorder="group"),
    "another packing": compressed("int-quantized", type="int"),
    "MXFP4 in groups of 64": compressed("mxfp4-pack-quantized", type="float", group_size=64),
    "two kinds of groups": compressed("pack-quantized", type="int")
    | {"config_groups": {n: group(type="int", group_size=n) for n in (32, 128)}},
    "rotated weights": compressed("pack-quantized", type="int")
    | {"transform_config": {"config_groups": {"R4": {"type": "hadamard"}}}},
}


def test_another_quantization_is_refused_with_those_that_are_read():
    for other in OTHERS.values():
        with pytest.raises(ConfigError, match="pack-quantized with symmetric groups of 4-bit"):
            encodings_of(other, "config.json")
