"""``moe-optim inspect`` says what a checkpoint holds, in words and as JSON."""

import json

import pytest

from moe_optim.checkpoint.files.torch_dist import TorchDistReader
from moe_optim.checkpoint.sealing import mark_unfinished, record_checksums
from moe_optim.commands.cli import main as cli
from tests.support.checkpoints.stored_checkpoints import (
    EXPERTS,
    FC1,
    FFN,
    HIDDEN,
    LAYERS,
    STATES,
    common_state,
    stored_tensors,
    write_torch_dist,
)
from tests.support.hostile.damage import flip_in, flip_in_archive, save_legacy


@pytest.fixture
def inspect(capsys, monkeypatch):
    """Return a function that runs the command; it gives exit code, output and errors."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*words):
        code = cli.main(["inspect", *map(str, words)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_the_report_says_what_was_stored(inspect, tmp_path):
    tensors, sizes = stored_tensors(), {"expert_model_parallel_size": 2, "data_parallel_size": 4}
    folder = write_torch_dist(tmp_path / "c", tensors, common_state(4, **sizes))
    code, out, _ = inspect(folder, "--json")
    report = json.loads(out)
    assert (code, report["defects"], report["faults"]) == (0, [], [])
    assert (report["format"], report["iteration"], report["version"]) == ("torch_dist", 7, "3.0")
    assert report["glu_interleave"] == 4
    assert report["parallel_sizes"] == {"expert": 2, "data": 4}
    assert report["optimizer"]["sharding"] == "fully_reshardable"
    assert report["tensors"] == len(tensors)
    assert report["bytes"] == sum(tensor.nbytes for tensor in tensors.values())
    assert len(report["experts"]) == LAYERS * (1 + len(STATES))
    assert report["experts"][0] == {
        "prefix": "decoder.layers.0.mlp.experts.",
        "holds": "weights",
        "layout": "grouped",
        "experts": EXPERTS,
        "hidden": HIDDEN,
        "ffn": FFN,
        "biases": False,
        "dtype": "bfloat16",
        "bytes": EXPERTS * 3 * FFN * HIDDEN * 2,
    }


def test_of_a_run_the_newest_of_its_checkpoints_is_taken(inspect, tmp_path):
    checkpoints = tmp_path / "checkpoints"
    write_torch_dist(checkpoints / "iter_0000007", stored_tensors(states=False))
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("7")
    code, out, err = inspect(tmp_path)
    assert (code, out.splitlines()[0]) == (0, str(checkpoints / "iter_0000007"))
    assert f"{tmp_path}: using its newest checkpoint, iter_0000007" in err


def test_a_checkpoint_that_is_not_whole_exits_with_1_and_names_the_file(inspect, tmp_path):
    folder = write_torch_dist(tmp_path / "c", stored_tensors(), one_file=False)
    lost = TorchDistReader(folder).blobs[FC1][0].file
    (folder / lost).unlink()
    code, out, _ = inspect(folder)
    assert code == 1
    assert f"complete       no: {lost} is missing" in out
    (defect,) = json.loads(inspect(folder, "--json")[1])["defects"]
    assert defect.startswith(f"{lost} is missing")


def test_thorough_finds_a_flipped_bit_that_sizes_do_not_show(inspect, tmp_path):
    folder = write_torch_dist(tmp_path / "c", stored_tensors())
    flip_in(folder, FC1)
    assert inspect(folder)[0] == 0
    code, out, _ = inspect(folder, "--thorough")
    assert code == 1
    assert "__0_0.distcp" in out and FC1 in "".join(out.split())
    assert inspect(folder, "--thorough", "--workers", "2")[:2] == (code, out)
    assert cli.main(["verify", str(folder), str(folder), "--workers", "2"]) == 2


def test_what_is_no_checkpoint_is_one_line_and_exits_with_2(inspect, tmp_path):
    (tmp_path / "note.txt").write_text("x")
    for name in ("nothing", "note.txt"):
        code, out, err = inspect(tmp_path / name)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith(f"error: {tmp_path / name}: expected a ")


def test_files_of_ranks_are_looked_at_without_being_loaded(inspect, tmp_path):
    """Of ``--ckpt-format torch``: whole, flipped, without a file, and while they are written."""
    save_legacy(tmp_path, (20,))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("20")
    folder = tmp_path / "iter_0000020"
    file = folder / "mp_rank_01" / "distrib_optim.pt"
    record_checksums(folder)
    code, out, err = inspect(tmp_path, "--thorough")
    assert (code, "iter_0000020" in err) == (0, True)
    assert "4 files of 2 ranks" in out
    flip_in_archive(file)
    assert inspect(folder)[0] == 0
    (defect,) = json.loads(inspect(folder, "--thorough", "--json")[1])["defects"]
    assert defect.startswith("mp_rank_01/distrib_optim.pt damaged archive: Bad CRC-32")
    file.unlink()
    code, out, _ = inspect(folder)
    assert (code, "mp_rank_01/distrib_optim.pt is missing" in out) == (1, True)
    mark_unfinished(folder)
    code, out, _ = inspect(folder)
    assert (code, "no: it was not saved to the end" in out) == (1, True)
    assert cli.main(["verify", str(folder), str(folder)]) == 2
