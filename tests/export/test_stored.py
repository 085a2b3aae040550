"""What is quantized for engines is recognized in files, whole and harmed."""

import json

import pytest
import torch

from moe_optim.checkpoints.stores.opening import open_checkpoint
from moe_optim.checkpoints.stores.reader import TensorInfo
from moe_optim.cli import main as cli
from moe_optim.export.conventions import CONVENTIONS
from moe_optim.export.files.stored import find_quantized
from tests.export.test_export_files import EXPERTS, FFN, HIDDEN, LAYERS, export, stored, write

LINEARS = ("gate_proj", "up_proj", "down_proj")
FIRST = "model.layers.0.mlp.experts.0.down_proj"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write(tmp_path_factory.mktemp("source") / "c", stored())


@pytest.fixture(params=CONVENTIONS, ids=lambda one: f"{one.format}, {one.name}")
def exported(request, source, tmp_path):
    """Return a convention, and the folder of what was exported in it."""
    return request.param, export(source, tmp_path / "e", request.param.format, request.param.name)


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
    parts = [convention.data, convention.scale, convention.global_scale]
    for part in filter(None, parts):
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


def test_a_checkpoint_without_quantized_weights_has_none(source):
    assert find_quantized(open_checkpoint(source).tensors) is None
    assert find_quantized({}) is None
