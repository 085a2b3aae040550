"""One run folder, one run."""

import signal
import subprocess
import sys

import pytest

from moe_optim.commands.train.run_folder import claim
from moe_optim.errors import StateError


def test_a_new_folder_is_created_and_can_be_claimed_again_afterwards(tmp_path):
    for _ in range(2):
        with claim(tmp_path / "runs" / "a", resume=False) as folder:
            assert folder.path == tmp_path / "runs" / "a"


def test_a_second_run_is_refused_while_the_first_lives(tmp_path):
    with (
        claim(tmp_path, resume=False),
        pytest.raises(StateError, match="another run is training in this folder"),
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
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    with claim(tmp_path, resume=False):
        pass


@pytest.mark.parametrize("leftover", ["summary.json", "checkpoints/iter_0000010"])
def test_results_are_never_overwritten_without_resume(tmp_path, leftover):
    path = tmp_path / leftover
    path.parent.mkdir(exist_ok=True)
    path.write_text("{}")
    with (
        pytest.raises(StateError, match=rf"already contains a run \({leftover}.*--resume.*--out"),
        claim(tmp_path, resume=False),
    ):
        pass
    with claim(tmp_path, resume=True):
        pass
