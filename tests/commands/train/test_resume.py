"""A run resumes from the newest checkpoint that is whole, and from no other."""

import shutil

import pytest

from moe_optim.checkpoint.files.folders import TRACKER
from moe_optim.commands.train.run_folder import (
    ResumePoint,
    find_resume_point,
    newest_complete_checkpoint,
)
from moe_optim.errors import StateError
from tests.support.training_runs.runs import write_checkpoint


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    checkpoints = tmp_path_factory.mktemp("checkpoints")
    for iteration in (10, 20):
        write_checkpoint(checkpoints, iteration)
    return checkpoints


@pytest.fixture
def checkpoints(template, tmp_path):
    return shutil.copytree(template, tmp_path / "checkpoints")


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


DEFECTS = {
    "no metadata.json": lambda folder: (folder / "metadata.json").unlink(),
    ".metadata is truncated or not torch's": lambda folder: cut(folder / ".metadata"),
    "__0_0.distcp is cut off": lambda folder: cut(folder / "__0_0.distcp"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_an_incomplete_checkpoint_is_passed_over_and_its_defect_named(checkpoints, defect):
    DEFECTS[defect](checkpoints / "iter_0000020")
    assert newest_complete_checkpoint(checkpoints) == 10
    point = find_resume_point(checkpoints)
    assert point.iteration == 10
    assert f"iter_0000020: {defect}" in point.notes[0]
    assert (checkpoints / TRACKER).read_text() == "10"


def test_the_tracker_is_mended_to_the_newest_whole_checkpoint(checkpoints):
    assert find_resume_point(checkpoints) == ResumePoint(20, ())
    tracker = checkpoints / TRACKER
    for said, was in (("", "''"), ("10", "'10'"), (None, "missing")):
        tracker.unlink() if said is None else tracker.write_text(said)
        point = find_resume_point(checkpoints)
        assert (point.iteration, tracker.read_text()) == (20, "20")
        assert point.notes == (f"set {TRACKER} to 20 (it was {was})",)


def test_no_checkpoint_at_all_is_an_error_by_name(tmp_path):
    with pytest.raises(StateError, match="--resume: .* no complete checkpoint .*there are none"):
        find_resume_point(tmp_path)


def test_only_broken_checkpoints_is_an_error_that_names_each(checkpoints):
    for folder in checkpoints.glob("iter_*"):
        (folder / "metadata.json").unlink()
    with pytest.raises(StateError, match=r"iter_0000020: no .*; .*iter_0000010: no"):
        find_resume_point(checkpoints)
    assert newest_complete_checkpoint(checkpoints) is None
