"""``python -m benchmarks convert`` measures a conversion that has been verified; figures vary."""

import json
import shlex

import pytest
import torch

from benchmarks import __main__ as benchmark
from benchmarks import convert as bench_convert
from benchmarks.convert import EXPERTS, LAYERS, Finished, Shapes, make_checkpoint
from moe_optim.commands.cli import main as cli
from moe_optim.commands.conversion.opening import open_checkpoint


@pytest.mark.parametrize("gigabytes", [0.5, 10, 100])
def test_a_checkpoint_is_about_as_large_as_asked_for(gigabytes):
    shapes = Shapes.of(gigabytes * 1e9)
    assert LAYERS * shapes.layer_parameters * 14 == pytest.approx(gigabytes * 1e9, rel=0.2)
    assert shapes.hidden % 32 == 0


def test_the_made_up_checkpoint_is_one_of_megatrons(tmp_path):
    nbytes = make_checkpoint(tmp_path / "c", Shapes(32))
    reader = open_checkpoint(tmp_path / "c")
    key = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
    assert reader.tensors[key].shape == (LAYERS, EXPERTS, 32, 32)
    assert f"optimizer.state.exp_avg_sq.{key}" in reader.tensors
    assert sum(info.nbytes for info in reader.tensors.values()) == nbytes
    values = reader.read(key, 0).view(torch.int16)
    assert values.unique().numel() > values.numel() // 4


def check_report(tmp_path, capsys):
    path = tmp_path / "report.json"
    words = ["--gigabytes", "0.01", "--dir", str(tmp_path), "--json", str(path)]
    assert benchmark.main(["convert", *words]) == 0
    report = json.loads(path.read_text())
    assert report["equal"] is True
    assert report["layer_bytes"] * LAYERS == report["bytes"]
    assert report["peak_bytes"] > report["peak_bytes_beyond_opening"]
    assert benchmark.build_parser().parse_args(shlex.split(report["command"])[3:]).gigabytes == 0.01
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.json"]
    assert "verified in" in capsys.readouterr().out


def test_the_report_is_that_of_a_verified_conversion(tmp_path, capsys, monkeypatch):
    """The same with the commands in this process, whose memory says nothing."""
    ran = []

    def run_here(*words):
        ran.append(words[0])
        assert cli.main(list(words)) == 0
        return Finished(seconds=1.0, peak_bytes=len(ran))

    monkeypatch.setattr(bench_convert, "_run", run_here)
    check_report(tmp_path, capsys)
    assert ran == ["inspect", "convert", "verify"]
