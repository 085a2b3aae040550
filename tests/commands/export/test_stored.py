"""What is quantized for engines is recognized in files, whole and harmed."""

import json

import pytest
import torch

from moe_optim.checkpoint.files.reader import TensorInfo
from moe_optim.commands.cli import main as cli
from moe_optim.commands.conversion.opening import open_checkpoint
from moe_optim.commands.export.stored import find_quantized
from moe_optim.rollout.conventions import CONVENTIONS
from tests.support.checkpoints.exported_models import EXPERTS, FFN, HIDDEN, LAYERS, export, in_files
from tests.support.checkpoints.hf_checkpoints import write_hf

LINEARS = ("gate_proj", "up_proj", "down_proj")
FIRST = "model.layers.0.mlp.experts.0.down_proj"


UNQUANTIZED = ["lm_head"] + [
    f"model.layers.{layer}.{module}"
    for layer in range(LAYERS)
    for module in ("mlp.gate", *(f"self_attn.{x}_proj" for x in "koqv"))
]


@pytest.fixture(scope="module", params=CONVENTIONS, ids=lambda one: f"{one.format}, {one.name}")
def exported(request, source, tmp_path_factory):
    """Return a convention, and the folder of what was exported in it."""
    folder = tmp_path_factory.mktemp("exported") / "e"
    return request.param, export(source, folder, request.param.format, request.param.name)


def test_each_convention_is_written_with_its_configuration(exported, hf):
    """The model is described as transformers describes it, and modules in bf16 are listed."""
    convention, folder = exported
    config = json.loads((folder / "config.json").read_text())
    of_engine = config.pop("quantization_config")
    assert config == json.loads((hf / "config.json").read_text())
    lists = ("modules_to_not_convert", "ignore")
    assert next(of_engine[name] for name in lists if name in of_engine) == sorted(UNQUANTIZED)
    suffixes = {name.rpartition(".")[2] for name in in_files(folder) if ".experts." in name}
    assert suffixes == set(convention.suffixes)


def test_inspect_names_the_format_and_every_expert(exported, capsys):
    """In every convention; of those that store alike it names all, and it has nothing to object."""
    convention, folder = exported
    assert cli.main(["inspect", str(folder), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["faults"] == report["defects"] == []
    assert report["quantized"]["format"] == convention.format
    assert convention.name in report["quantized"]["conventions"]
    assert report["quantized"]["weights"] == LAYERS * EXPERTS * len(LINEARS)
    assert len(report["experts"]) == LAYERS
    for layer in report["experts"]:
        shape = [layer[size] for size in ("experts", "hidden", "ffn")]
        assert (shape, layer["dtype"]) == ([EXPERTS, HIDDEN, FFN], convention.format)
    tensors = open_checkpoint(folder).tensors
    of_experts = sum(info.nbytes for name, info in tensors.items() if ".experts." in name)
    assert sum(layer["bytes"] for layer in report["experts"]) == of_experts
    assert cli.main(["inspect", str(folder)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"weights in {convention.format} for engines, in the names of" in said


def test_every_part_that_is_missing_or_does_not_fit_is_named(exported):
    convention, folder = exported
    tensors = dict(open_checkpoint(folder).tensors)
    for part in convention.suffixes:
        key = f"{FIRST}.{part}"
        for other in (None, TensorInfo((3, 5), torch.float16)):
            harmed = {k: v for k, v in tensors.items() if k != key} | (
                {key: other} if other else {}
            )
            found = find_quantized(harmed)
            (fault,) = found.faults
            assert fault.startswith(f"{key}: expected ")
            assert fault.endswith("got nothing" if other is None else "got float16 [3, 5]")
            assert len(found.weights) == LAYERS * EXPERTS * len(LINEARS) - 1


def test_codes_are_not_taken_for_values(exported, tmp_path, capsys):
    """One error that says so: of export, of both conversions; verify compares what is stored."""
    source, out = str(exported[1]), str(tmp_path / "out")
    assert cli.main(["verify", source, source]) == 0
    for command in (
        ["export", source, out, "--format", "nvfp4"],
        ["convert", source, out, "--experts", "hf"],
    ):
        capsys.readouterr()
        assert cli.main(command) == 2
        said = capsys.readouterr().err
        assert "that are quantized, such as" in said
        assert len(said.splitlines()) == 1


@pytest.mark.parametrize(("part", "to"), [("self_attn", "export"), ("experts", "megatron")])
def test_codes_without_a_configuration_are_refused(part, to, hf, tmp_path, capsys):
    """Dense weights in FP8 blocks too, which an export would list as not quantized."""
    config = json.loads((hf / "config.json").read_text())
    tensors = {
        key: one.to(torch.float8_e4m3fn) if part in key and one.dim() == 2 else one
        for key, one in in_files(hf).items()
    }
    source = str(write_hf(tmp_path / "c", tensors, config))
    how = {
        "export": ["export", source, str(tmp_path / "o"), "--format", "mxfp8"],
        "megatron": ["convert", source, str(tmp_path / "o"), "--to", "megatron"],
    }
    assert cli.main(how[to]) == 2
    assert "that are quantized, such as" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()
