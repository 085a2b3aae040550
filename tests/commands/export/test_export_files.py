"""A checkpoint becomes what engines load, with the bytes that training makes of its masters."""

import json
import re
import shutil

import pytest
import torch

from moe_optim.commands.cli import export as cli_export
from moe_optim.commands.cli import main as cli
from moe_optim.commands.conversion.model_conversion import ModelRequest, plan_model
from moe_optim.commands.conversion.opening import open_checkpoint
from moe_optim.commands.export.export import plan_export
from moe_optim.errors import ConfigError, StateError
from moe_optim.formats import FORMATS as FORMATS_OF_TRAINING
from moe_optim.formats import get_format, reference
from moe_optim.rollout.conventions import find_convention
from tests.support.bytes import assert_bytes_equal, assert_same_tensors
from tests.support.checkpoints.exported_models import (
    EXPERTS,
    FC1,
    FC2,
    FFN,
    LAYERS,
    MASTERS,
    export,
    in_files,
    masters,
    request_of,
    stored,
    write,
)
from tests.support.checkpoints.hf_checkpoints import write_hf
from tests.support.checkpoints.stored_checkpoints import interleaved
from tests.support.modules import serving

FORMATS = ("mxfp8", "mxfp8_2d", "nvfp4", "fp8_block", "mxfp4", "nvfp4_rows", "int4_g128")


def test_the_conventions_that_a_format_takes_are_those_of_engines():
    for name, formats in cli_export.CONVENTIONS.items():
        for format in FORMATS_OF_TRAINING.values():
            if format.name in formats:
                assert find_convention(format, name).name == name
            else:
                with pytest.raises(ConfigError, match=f"for {format.name}, got '{name}'"):
                    find_convention(format, name)


def wanted_experts(values, format):
    """Return every expert's tensors by name, from fp32 or bf16 values of fc1 and fc2."""
    found = {}
    for layer in range(LAYERS):
        for key, parts in ((FC1, ("gate_proj", "up_proj")), (FC2, ("down_proj",))):
            quantized = reference.quantize(values[key][layer].float(), get_format(format))
            for expert, tensors in enumerate(serving.experts_of(quantized)):
                stem = f"model.layers.{layer}.mlp.experts.{expert}."
                for suffix, tensor in tensors.items():
                    rows = tensor.chunk(len(parts)) if tensor.dim() == 2 else [tensor] * len(parts)
                    if suffix == "weight_shape":
                        rows = [torch.tensor([tensor[0] // len(parts), tensor[1]])] * len(parts)
                    for part, one in zip(parts, rows, strict=True):
                        found[f"{stem}{part}.{suffix}"] = one.contiguous()
    return found


@pytest.mark.parametrize("format", FORMATS)
def test_experts_are_what_training_makes_of_their_masters(format, source, tmp_path):
    got = in_files(export(source, tmp_path / "out", format))
    of_experts = {key: one for key, one in got.items() if ".experts." in key}
    assert_same_tensors(of_experts, wanted_experts(masters(), format))


def test_without_masters_they_are_made_of_the_weights(tmp_path):
    """As from any model of Hugging Face, here of one in safetensors."""
    tensors = stored(with_masters=False)
    source = write(tmp_path / "source", tensors)
    plan_model(open_checkpoint(source), ModelRequest(to="hf")).write(tmp_path / "hf")
    wanted = wanted_experts(tensors, "nvfp4")
    for number, path in enumerate((source, tmp_path / "hf")):
        got = in_files(export(path, tmp_path / f"out{number}", "nvfp4"))
        assert_same_tensors({k: one for k, one in got.items() if ".experts." in k}, wanted)


def test_everything_else_is_as_in_the_model_of_hugging_face(source, hf, tmp_path):
    dense = {k: one for k, one in in_files(hf).items() if ".experts." not in k}
    for number, path in enumerate((source, hf)):
        got = in_files(export(path, tmp_path / f"out{number}", "mxfp8"))
        assert_same_tensors({k: one for k, one in got.items() if ".experts." not in k}, dense)


@pytest.mark.parametrize("rows", [64, 128])
def test_interleaved_rows_of_training_come_apart(rows, tmp_path):
    """Runs that are no multiple of a block's height too: experts are quantized as they are told
    apart, gate rows first."""
    tensors = stored()
    for key in (FC1, MASTERS + FC1):
        tensors[key] = interleaved(tensors[key], rows)
    source = write(tmp_path / "source", tensors, moe_mlp_glu_interleave_size=rows)
    got = in_files(export(source, tmp_path / "out", "mxfp8"))
    of_experts = {key: one for key, one in got.items() if ".experts." in key}
    assert_same_tensors(of_experts, wanted_experts(masters(), "mxfp8"))


def test_tokenizers_come_along_and_special_tokens_of_the_model_stay(hf, tmp_path):
    """Of the model's folder, or of a given one, which may have no config.json that names them."""
    config = json.loads((hf / "config.json").read_text()) | {"eos_token_id": 7}
    source = write_hf(tmp_path / "source", in_files(hf), config)
    words = tmp_path / "words"
    words.mkdir()
    for folder, text in ((source, "{}"), (words, "[]")):
        (folder / "tokenizer.json").write_text(text)
    for tokenizer, text in ((None, "{}"), (words, "[]")):
        folder = export(source, tmp_path / f"out {text}", "mxfp8", tokenizer=tokenizer)
        assert (folder / "tokenizer.json").read_text() == text
        assert json.loads((folder / "config.json").read_text())["eos_token_id"] == 7


# What is refused, with nothing written


def test_gate_and_up_that_share_a_block_are_refused_with_formats_that_hold_them(tmp_path, capsys):
    """No other advice needs an option, and what the message advises is written."""
    source = write(tmp_path / "source", stored(96), 96)
    words = ["export", str(source), str(tmp_path / "out"), "--format"]
    assert cli.main([*words, "fp8_block"]) == 2
    said = capsys.readouterr().err
    assert "linear_fc1: expected gate and up in runs of 128 rows" in said
    assert re.findall(r"--[a-z-]+", said) == ["--format", "--moe-ffn-hidden-size"]
    assert not (tmp_path / "out").exists()
    (advised,) = re.findall(r"--format (.*?), whose", said)
    assert advised == "mxfp8, mxfp8_2d, nvfp4, mxfp8_rows, mxfp4, nvfp4_rows or int4"
    reader = open_checkpoint(source)
    for name in re.split(", | or ", advised):
        assert plan_export(reader, request_of(name)).files


def test_a_model_without_a_description_is_refused_with_what_to_give(hf, tmp_path):
    tensors, config = in_files(hf), json.loads((hf / "config.json").read_text())
    bare = write_hf(tmp_path / "bare", tensors, config)
    (bare / "config.json").unlink()
    with pytest.raises(ConfigError, match="config.json: expected the configuration of the model"):
        export(bare, tmp_path / "out", "mxfp8")
    plan = plan_export(open_checkpoint(bare), request_of("mxfp8"), hf / "config.json")
    plan.write(tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["model_type"] == "qwen3_moe"


COMMANDS = (
    ["export", "{source}", "{target}", "--format", "mxfp8"],
    ["convert", "{source}", "{target}", "--experts", "grouped"],
    ["inspect", "{source}"],
)


@pytest.mark.parametrize("what", ["the last expert", "all experts"])
def test_experts_that_a_layer_has_lost_are_missed(what, hf, tmp_path, capsys):
    """A last one has no number after it, and all leave no key: ``config.json`` and the router of
    the layer tell of them."""
    lost = "model.layers.1.mlp.experts." + (f"{EXPERTS - 1}." if what == "the last expert" else "")
    tensors = {key: one for key, one in in_files(hf).items() if not key.startswith(lost)}
    config = json.loads((hf / "config.json").read_text())
    source = write_hf(tmp_path / "source", tensors, config)
    for command in COMMANDS:
        status = cli.main([word.format(source=source, target=tmp_path / "out") for word in command])
        printed = capsys.readouterr()
        said = " ".join((printed.out + printed.err).split())
        assert status == 2 or command[0] == "inspect"
        if what == "the last expert":
            assert f"{lost}gate_proj.weight: missing" in said
        else:
            assert "model.layers.1.mlp.gate.weight: expected experts beside it" in said
    assert not (tmp_path / "out").exists()


def test_masters_of_some_experts_are_not_mixed_with_weights_of_others(tmp_path):
    """Layers stored apart, of which one has no masters: all come from weights."""
    tensors = stored(with_masters=False)
    apart = {}
    for key, values in tensors.items():
        for layer in range(LAYERS):
            name = key.replace("decoder.layers.", f"decoder.layers.{layer}.")
            apart[name] = values[layer] if name != key else values
    for key, values in masters().items():
        apart[MASTERS + key.replace("decoder.layers.", "decoder.layers.0.")] = values[0]
    source = write(tmp_path / "source", apart)
    plan = plan_export(open_checkpoint(source), request_of("mxfp8"))
    assert not plan.reads_masters
    plan.write(tmp_path / "out")
    got = in_files(tmp_path / "out")
    for name, want in wanted_experts(tensors, "mxfp8").items():
        assert_bytes_equal(got[name], want, what=name)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp8_2d"])
def test_blocks_hold_the_rows_that_they_hold_in_training(format, tmp_path):
    """Runs of 8 rows: a square block has rows of gate and of up."""
    rows, tensors = 8, stored()
    for key in (FC1, MASTERS + FC1):
        tensors[key] = interleaved(tensors[key], rows)
    source = write(tmp_path / "source", tensors, moe_mlp_glu_interleave_size=rows)
    got = in_files(export(source, tmp_path / "out", format))
    for layer in range(LAYERS):
        buffers = reference.quantize(tensors[MASTERS + FC1][layer], get_format(format))
        data = buffers.rowwise_data.view(torch.uint8)
        runs = data.view(EXPERTS, FFN // rows, 2, rows, -1)
        for expert in range(EXPERTS):
            for half, name in enumerate(("gate_proj", "up_proj")):
                key = f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight"
                want = runs[expert, :, half].flatten(0, 1)
                assert_bytes_equal(got[key].view(torch.uint8), want)


def test_masters_that_are_no_numbers_are_refused(tmp_path):
    for value in (torch.inf, torch.nan):
        tensors = stored()
        tensors[MASTERS + FC1][1, 2, 3, 4] = value
        source = write(tmp_path / str(value), tensors)
        with pytest.raises(StateError, match="linear_fc1, expert 2: expected numbers"):
            export(source, tmp_path / "out", "nvfp4")
    assert not (tmp_path / "out").exists()


def test_what_a_killed_command_has_left_is_no_checkpoint(source, hf, tmp_path):
    """Also where all that is looked for first is there."""
    for folder in (source, hf):
        killed = shutil.copytree(folder, tmp_path / f"{folder.name}.partial-0123abcd")
        with pytest.raises(StateError, match="was killed"):
            open_checkpoint(killed)
