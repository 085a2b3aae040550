"""One run folder, one run."""

import contextlib
import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from moe_optim.commands.train.inheritance import recall_arguments, remembered
from moe_optim.commands.train.run_folder import RunFolder, claim, recall_text, remember_text
from moe_optim.config.recipes import load_recipe
from moe_optim.errors import ConfigError, StateError
from tests.support.training_runs.runs import write_checkpoint


def test_a_new_folder_is_created_and_can_be_claimed_again_afterwards(tmp_path):
    for _ in range(2):
        with claim(tmp_path / "runs" / "a", resume=False) as folder:
            assert folder.path == tmp_path / "runs" / "a"


def test_a_second_run_is_refused_while_the_first_lives_and_told_who_it_is(tmp_path):
    with (
        claim(tmp_path, resume=False),
        pytest.raises(StateError, match=rf"another run .*process {os.getpid()}\)"),
        claim(tmp_path, resume=True),
    ):
        pass


def test_a_killed_run_leaves_no_lock_behind(tmp_path):
    """The lock belongs to the process, not to the file: kill -9 gives it back."""
    code = (
        "import os, signal; from pathlib import Path\n"
        "from moe_optim.commands.train.run_folder import claim\n"
        f"with claim(Path({str(tmp_path)!r}), resume=False): os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    with claim(tmp_path, resume=False):
        pass


@pytest.mark.parametrize("resume", [False, True])
def test_what_was_refused_before_it_wrote_anything_leaves_nothing(resume, tmp_path):
    """Neither a new folder with its parents, nor a lock in one that was there."""
    (tmp_path / "there").mkdir()
    for path in (tmp_path / "new" / "a", tmp_path / "there"):
        with pytest.raises(ConfigError), claim(path, resume=resume):
            raise ConfigError("no such text")
    assert list(tmp_path.rglob("*")) == [tmp_path / "there"]
    with pytest.raises(ConfigError), claim(tmp_path / "new", resume=resume) as folder:
        remember_text(folder, [])
        raise ConfigError("a rank failed")
    assert folder.lock.is_file()


@pytest.mark.parametrize("leftover", ["summary.json", "checkpoints/iter_0000010"])
def test_results_are_never_overwritten_without_resume(tmp_path, leftover):
    path = tmp_path / leftover
    path.parent.mkdir(exist_ok=True)
    path.write_text("{}")
    with (
        pytest.raises(StateError, match=rf"already holds a run \({leftover}.*--resume.*--out"),
        claim(tmp_path, resume=False),
    ):
        pass
    with claim(tmp_path, resume=True):
        pass


def test_a_run_that_failed_before_its_first_checkpoint_can_be_started_again(tmp_path):
    (tmp_path / "logs" / "launch1").mkdir(parents=True)
    (tmp_path / "model.json").write_text(json.dumps({}))
    with claim(tmp_path, resume=False) as folder:
        assert folder.next_log_folder() == tmp_path / "logs" / "launch2"


@pytest.mark.parametrize("out", ["file", "file/below"])
def test_a_file_in_the_way_is_named(tmp_path, out):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="expected a folder"), claim(tmp_path / out, resume=False):
        pass


def test_the_text_of_a_run_is_remembered_from_wherever_it_was_named(tmp_path, monkeypatch):
    """The standard library is no path at all; a run of an older version has no record."""
    folder, text, other = RunFolder(tmp_path), [Path("a.txt"), Path("below")], [Path("b.txt")]
    assert recall_text(folder, []) == []
    assert recall_text(folder, other) == other
    monkeypatch.chdir(tmp_path)
    remember_text(folder, text)
    monkeypatch.chdir("/")
    began = [tmp_path / path for path in text]
    assert recall_text(folder, []) == began
    assert recall_text(folder, [*reversed(began)]) == began
    with pytest.raises(ConfigError, match=rf"expected {began[0]} {began[1]}, .* got b.txt\. Leave"):
        recall_text(folder, other)
    remember_text(folder, [])
    assert recall_text(folder, []) == []
    with pytest.raises(ConfigError, match="expected the standard library, which .* got b.txt"):
        recall_text(folder, other)
    folder.text.write_text("[")
    with pytest.raises(StateError, match=r"text.json: expected a list of paths"):
        recall_text(folder, [])


def test_arguments_are_remembered_of_the_run_that_left_the_newest_checkpoint(tmp_path):
    """A launch that leaves none newer, whether it failed or raised, leaves the record as it was."""
    recipe = load_recipe("quickstart")

    def launch(folder, seed, *checkpoints, error=False):
        args = Namespace(set=[], megatron_args=["--seed", seed, "--ckpt-step", "1"], stock=False)
        with contextlib.suppress(OSError), remembered(folder, args, recipe):
            for iteration in checkpoints:
                write_checkpoint(folder.checkpoints, iteration)
            if error:
                raise OSError

    def recorded(folder):
        return recall_arguments(folder).megatron_args

    folder = RunFolder(tmp_path)
    assert recall_arguments(folder) is None
    launch(folder, "1")
    assert recorded(folder) == ["--seed", "1"]
    launch(folder, "2", 10)
    assert recorded(folder) == ["--seed", "2"]
    launch(folder, "3")
    launch(folder, "4", error=True)
    assert recorded(folder) == ["--seed", "2"]
    launch(folder, "5", 20, error=True)
    assert recorded(folder) == ["--seed", "5"]
