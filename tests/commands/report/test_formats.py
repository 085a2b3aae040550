"""One recipe in several formats, with ranks that only pretend to train."""

import json

import pytest

from moe_optim.commands.cli import main as cli
from moe_optim.commands.train import run as train
from tests.support.training_runs.runs import FAKE_RANK, REPOSITORY

RECIPE = REPOSITORY / "recipes" / "quickstart.yaml"


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """Run `moe-optim train --formats` on a small text; returns exit code, stdout and stderr."""
    monkeypatch.setattr(train, "RANK_MODULE", FAKE_RANK)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)

    def run(*options, behaviour=""):
        monkeypatch.setenv("FAKE_RANK", behaviour)
        words = ["train", str(RECIPE), "--out", str(tmp_path / "out"), "--cpu", *options]
        words += ["--text", str(text), "--", "--train-iters", "4", "--eval-interval", "2"]
        return cli.main(words), *capsys.readouterr()

    return run


def test_every_format_has_a_run_of_its_own_and_they_are_compared(command, tmp_path):
    code, screen, _ = command("--formats", "bf16", "nvfp4")
    assert code == 0
    for format in ("bf16", "nvfp4"):
        (log,) = (tmp_path / "out" / format).glob("logs/*/attempt_0/0/stdout.log")
        assert f'format=\\"{format}\\"' in log.read_text()
    rows = json.loads((tmp_path / "out" / "compare" / "compare.json").read_text())
    assert [row["run"] for row in rows] == ["bf16", "nvfp4"]
    assert str(tmp_path / "out" / "compare" / "index.html") in screen
