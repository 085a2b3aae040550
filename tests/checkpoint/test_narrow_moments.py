"""Narrow moments as files: inspected, compared and converted, flat or by name."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from moe_optim.commands.cli import main as cli
from moe_optim.config import MoEOptimConfig
from tests.support.ranks import run_ranks
from tests.support.training import pretrain

pytest.importorskip("megatron.core")

STEPS = ["--train-iters", "2", "--eval-interval", "2"]
NARROW = "--use-precision-aware-optimizer --exp-avg-dtype {} --exp-avg-sq-dtype {}"
FLAT = {  # moments -> dtypes of files; scaled ones are saved as the values they stand for
    ("bf16", "bf16"): ("bfloat16", "bfloat16"),
    ("fp8", "fp16"): ("float32", "float32"),
}
MOMENTS = ("exp_avg", "exp_avg_sq")


def save(folder: Path, moments: tuple[str, str], *flags: str) -> Path:
    """Train two steps on two ranks, and return the one checkpoint of them."""
    options = [*STEPS, *flags, *NARROW.format(*moments).split(), "--save", str(folder)]
    run_ranks(2, pretrain, options, MoEOptimConfig(format="mxfp8"))
    return folder / "iter_0000002"


@pytest.fixture
def run(capsys):
    """Return a function that runs a command; it gives exit code and what was printed."""

    def call(*words: Any) -> tuple[int, str]:
        code = cli.main([*map(str, words)])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return call


def dtypes_of(run: Any, checkpoint: Path) -> dict[str, Any]:
    code, said = run("inspect", "--json", checkpoint)
    assert code == 0
    found: dict[str, Any] = json.loads(said)["optimizer"]
    return found


@pytest.mark.parametrize(
    "moments", [("fp8", "fp16"), pytest.param(("bf16", "bf16"), marks=pytest.mark.extended)]
)
def test_flat_states_are_inspected_and_compared_and_converted_without_them(moments, run, tmp_path):
    """Converting them is refused before there is anything at the target; weights go there and back
    to the byte."""
    saved = save(tmp_path / "saved", moments)
    found = dtypes_of(run, saved)
    assert found["sharding"] == "dp_reshardable"
    stored = [[dtype] for dtype in FLAT[moments]]
    assert found["dtypes"] == {"param": ["float32"]} | dict(zip(MOMENTS, stored, strict=True))

    copy = shutil.copytree(saved, tmp_path / "copy")
    code, said = run("verify", saved, copy)
    assert code == 0
    assert "not compared: the two" not in said  # flat states were
    for to, *more in (("hf", "--format", "safetensors"), ("grouped",)):
        target = tmp_path / f"refused {to}"
        code, said = run("convert", saved, target, "--experts", to, *more)
        assert code == 2
        assert "expected optimizer states by parameter, got whole buckets" in said
        assert "--dist-ckpt-optim-fully-reshardable, or convert with --weights-only" in said
        assert not target.exists()

    there, back = tmp_path / "there", tmp_path / "back"
    to_hf = ("--experts", "hf", "--format", "safetensors", "--weights-only")
    assert run("convert", saved, there, *to_hf)[0] == 0
    assert run("convert", there, back, "--experts", "grouped", "--format", "torch_dist")[0] == 0
    assert run("verify", saved, back, "--weights-only")[0] == 0
    code, said = run("verify", saved, back)
    assert code == 1  # back has no states
    assert "exp_avg_sq: only in A" in said
