"""Models of Hugging Face whose weights are FP8 blocks become Megatron's in bf16."""

import json

import pytest
import torch

from moe_optim.commands.conversion.model_conversion import convert_model
from moe_optim.commands.conversion.model_plan import ModelRequest, plan_model
from moe_optim.commands.conversion.opening import open_checkpoint
from moe_optim.commands.conversion.published_weights import encodings_of
from moe_optim.errors import ConfigError, LayoutError
from tests.support.bytes import assert_same_tensors, assert_values_equal
from tests.support.checkpoints.exported_models import in_files
from tests.support.checkpoints.hf_checkpoints import write_hf, write_megatron
from tests.support.checkpoints.stored_checkpoints import read_with_torch

BLOCK = (8, 4)  # of 16 x 12 and other weights: whole blocks, and blocks that the edge cuts
QUANTIZATION = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": list(BLOCK),
}
FAMILIES = ("qwen3_moe", "deepseek_v3")
GATE = "model.layers.1.mlp.experts.2.gate_proj.weight"


def convert(source, target, to):
    convert_model(plan_model(open_checkpoint(source), ModelRequest(to=to)), target)
    return target


def is_quantized(name, tensor):
    """As DeepSeek publishes: linears, and neither embeddings, output layer, routers nor norms."""
    whole = ("embed_tokens", "lm_head", "mlp.gate.", "norm", "bias")
    return tensor.dim() == 2 and not any(word in name for word in whole)


def published(tensors):
    """Return tensors with random elements and scales in place of linears, and what these mean.

    Among the elements are all 256, NaN included; scales are of all magnitudes and no powers of two.
    """
    generator = torch.Generator().manual_seed(3)
    stored, values = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if not is_quantized(name, tensor):
            continue
        rows, cols = tensor.shape
        codes = torch.randint(0, 256, (rows, cols), generator=generator).to(torch.uint8)
        counts = -(-rows // BLOCK[0]), -(-cols // BLOCK[1])
        exponents = torch.randint(-12, 3, counts, generator=generator)
        scales = torch.ldexp(torch.rand(counts, generator=generator) + 0.5, exponents)
        stored[name] = codes.view(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scales
        whole = torch.empty(rows, cols)
        for row in range(rows):
            for col in range(cols):
                whole[row, col] = scales[row // BLOCK[0], col // BLOCK[1]]
        values[name] = (stored[name].to(torch.float32) * whole).to(torch.bfloat16)
    return stored, values


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
    """Return tensors and configuration of a model as transformers has it in bf16."""
    root = tmp_path_factory.mktemp("model")
    folder = convert(write_megatron(root / "c", request.param), root / "hf", "hf")
    return in_files(folder), json.loads((folder / "config.json").read_text())


def test_what_megatron_gets_is_element_times_scale_to_the_bit(model, tmp_path):
    """Rounded once to bf16: the same checkpoint as from a model that was published in bf16."""
    tensors, config = model
    stored, values = published(tensors)
    quantized = write_hf(tmp_path / "fp8", stored, config | {"quantization_config": QUANTIZATION})
    plain = write_hf(tmp_path / "bf16", values, config)
    got, want = (
        convert(one, tmp_path / f"{one.name} back", "megatron") for one in (quantized, plain)
    )
    assert_same_tensors(
        read_with_torch(open_checkpoint(got).path), read_with_torch(open_checkpoint(want).path)
    )
    assert_same_tensors(in_files(convert(got, tmp_path / "again", "hf")), values)


@pytest.mark.parametrize("model", ["deepseek_v3"], indirect=True)
def test_scales_that_are_bare_exponents_are_powers_of_two_to_the_bit(model, tmp_path):
    """E8M0, as ``scale_fmt: ue8m0`` has them: code n means 2^(n - 127), 255 NaN."""
    tensors, config = model
    stored, values = published(tensors)
    names = [name for name in stored if name.endswith("_scale_inv")]
    counts = [stored[name].numel() for name in names]
    drawn = torch.randint(0, 256, (sum(counts),), generator=torch.Generator().manual_seed(4))
    drawn[:4] = torch.tensor([0, 1, 254, 255])
    codes = drawn.to(torch.uint8).split(counts)
    for name, code in zip(names, codes, strict=True):
        weight = name.removesuffix("_scale_inv")
        exact = torch.tensor(
            [float("nan") if n == 255 else 2.0 ** (n - 127) for n in code.tolist()]
        )
        whole = exact.view(stored[name].shape)
        for axis, size in enumerate(BLOCK):
            whole = whole.repeat_interleave(size, axis)
        rows, cols = stored[weight].shape
        values[weight] = (stored[weight].float() * whole[:rows, :cols]).bfloat16()
        stored[name] = code.view(stored[name].shape).view(torch.float8_e8m0fnu)
    quantization = QUANTIZATION | {"scale_fmt": "ue8m0"}
    quantized = write_hf(tmp_path / "q", stored, config | {"quantization_config": quantization})
    plain = write_hf(tmp_path / "bf16", values, config)
    got, want = (
        open_checkpoint(convert(one, tmp_path / f"{one.name} back", "megatron")).path
        for one in (quantized, plain)
    )
    given, wanted = read_with_torch(got), read_with_torch(want)
    assert given.keys() == wanted.keys()
    for name in given:
        assert_values_equal(given[name], wanted[name], what=name)


FAULTS = {
    "missing": (lambda t: t.pop(f"{GATE}_scale_inv"), f"{GATE}_scale_inv: missing"),
    "of another shape": (
        lambda t: t.update({f"{GATE}_scale_inv": torch.ones(3, 3)}),
        f"{GATE}_scale_inv: expected float32, bfloat16, float16 or float8_e8m0fnu [1, 3] for "
        "[8, 12], got float32 [3, 3]",
    ),
    "of another type": (
        lambda t: t.update({f"{GATE}_scale_inv": torch.ones(1, 3).double()}),
        "got float64 [1, 3]",
    ),
    "of no weight in FP8": (
        lambda t: t.update({"lm_head.weight_scale_inv": torch.ones(2, 3)}),
        "lm_head.weight_scale_inv: left over",
    ),
}


@pytest.mark.parametrize("model", ["deepseek_v3"], indirect=True)
def test_scales_that_do_not_fit_are_named_and_nothing_is_written(model, tmp_path):
    tensors, config = model
    stored, _ = published(tensors)
    for number, (harm, said) in enumerate(FAULTS.values()):
        harmed = dict(stored)
        harm(harmed)
        quantized = config | {"quantization_config": QUANTIZATION}
        source = write_hf(tmp_path / str(number), harmed, quantized)
        with pytest.raises(LayoutError) as error:
            convert(source, tmp_path / "back", "megatron")
        assert said in str(error.value)
    assert not (tmp_path / "back").exists()


OTHERS = {
    "another method": {"quant_method": "awq"},
    "elements of another kind": QUANTIZATION | {"fmt": "e5m2"},
    "no blocks": QUANTIZATION | {"weight_block_size": None},
    "blocks of nothing": QUANTIZATION | {"weight_block_size": [0, 128]},
    "no mapping": "fp8",
}


def test_another_quantization_is_refused_by_name():
    for other in OTHERS.values():
        with pytest.raises(ConfigError, match="quant_method fp8 with fmt e4m3"):
            encodings_of(other, "config.json")
