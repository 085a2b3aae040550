"""``python -m benchmarks convert`` measures a conversion that has been verified; figures vary."""

import json
import shlex

from benchmarks import __main__ as benchmark
from benchmarks import convert as bench_convert
from benchmarks.convert import LAYERS, Finished
from moe_optim.commands.cli import main as cli


def test_the_report_is_that_of_a_verified_conversion(tmp_path, capsys, monkeypatch):
    """With the commands in this process, whose memory says nothing."""
    ran = []

    def run_here(*words):
        ran.append(words[0])
        assert cli.main(list(words)) == 0
        return Finished(seconds=1.0, peak_bytes=len(ran))

    monkeypatch.setattr(bench_convert, "_run", run_here)
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
    assert ran == ["inspect", "convert", "verify"]
