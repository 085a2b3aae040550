"""``moe-optim verify`` exits with 0, 1 or 2, and shows what differs."""

import json
import re

import pytest
import torch

from moe_optim.commands.cli import main as cli
from tests.support.checkpoints.stored_checkpoints import (
    FC1,
    FFN,
    FLAT,
    HIDDEN,
    LAYERS,
    stored_tensors,
    write_torch_dist,
)

WEIGHTS = 2 * LAYERS + 2


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_torch_dist(tmp_path_factory.mktemp("source") / "c", stored_tensors(states=False))


@pytest.fixture
def verify(capsys, monkeypatch):
    """Return a function that runs the command; it gives exit code, output and errors."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*words):
        code = cli.main(["verify", *map(str, words)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def changed(folder, **bits):
    """Write a checkpoint where one bit of fc1 is flipped: expert 3 of layer 2, row 1, column 4."""
    tensors = stored_tensors(states=False)
    tensors[FC1].view(torch.int16)[2, 3, 1, 4] ^= 1
    return write_torch_dist(folder, tensors | bits)


def test_a_flipped_bit_is_shown_with_its_expert_and_exits_with_1(verify, source, tmp_path):
    code, out, _ = verify(source, changed(tmp_path / "b"))
    assert code == 1
    elements = 2 * FFN * HIDDEN
    assert re.search(rf"experts.linear_fc1\S* +3 +1 of {elements} +\[1, 4\]", out), out
    assert f"not equal: 1 difference in {WEIGHTS} tensors" in out


def test_json_lists_every_difference(verify, source, tmp_path):
    """With null for a largest difference of infinity, which is no JSON."""
    weights = stored_tensors(states=False)
    infinite = write_torch_dist(tmp_path / "a", weights | {"new": torch.tensor([torch.inf])})
    other = changed(tmp_path / "b", **{"new": torch.zeros(1), "more": torch.zeros(2)})
    code, out, _ = verify(infinite, other, "--json")
    report = json.loads(out)
    assert (code, report["equal"], "Infinity" in out) == (1, False, False)
    assert report["tensors"] == WEIGHTS + 1
    by_name = {one["name"]: one for one in report["differences"]}
    first = by_name.pop("decoder.layers.2.mlp.experts.linear_fc1.weight")
    assert (first["expert"], first["differing"], first["first"]) == (3, 1, [1, 4])
    assert by_name.pop("more")["what"] == "only in B"
    assert by_name.pop("new")["largest"] is None
    assert not by_name
    assert json.loads(verify(source, source, "--json")[1])["equal"] is True


def test_states_that_could_not_be_compared_are_not_called_equal(verify, tmp_path):
    """Flat ones in buckets of other sizes. The exit code is 1, and JSON has null for equal."""
    weights = stored_tensors(states=False)
    a, b = (
        write_torch_dist(tmp_path / name, weights | {FLAT: torch.zeros(size)})
        for name, size in (("a", 64), ("b", 32))
    )
    code, out, _ = verify(a, b)
    assert code == 1
    assert "no difference in" in out and "not all were compared" in out
    assert not any(line.startswith("equal") for line in out.splitlines())
    report = json.loads(verify(a, b, "--json")[1])
    assert (report["equal"], report["differences"], report["skipped"]) == (None, [], [FLAT])
    assert verify(a, b, "--weights-only")[0] == 0
    other = write_torch_dist(
        tmp_path / "c", weights | {FLAT: torch.zeros(32), "new": torch.zeros(2)}
    )
    assert json.loads(verify(a, other, "--json")[1])["equal"] is False
