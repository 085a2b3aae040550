"""Nothing of a rank outlives its end or that of its launcher."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moe_optim.commands.train import rank_guard
from tests.support.training_runs.runs import is_running, wait_for

GUARD = (sys.executable, "-I", "-S", rank_guard.__file__)
LEAVE_CHILD = "sleep 600 & echo $! > {0}.tmp && mv {0}.tmp {0}; "


def guarded(script, **options):
    command = [*GUARD, str(os.getpid()), "sh", "-c", script]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)


def pid_in(path: Path) -> int:
    assert wait_for(path.exists)
    return int(path.read_text())


@pytest.mark.parametrize(
    ("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", -9), ("kill -ABRT $$", -6)]
)
def test_the_guard_ends_as_the_rank_ended(script, code):
    with guarded(script) as guard:
        guard.communicate()
    assert guard.returncode == code


def test_a_command_that_cannot_be_started_is_named():
    command = [*GUARD, str(os.getpid()), "no-such-command"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (
        127,
        "error: no-such-command: cannot be started: No such file or directory\n",
    )


def test_stderr_joins_stdout_in_order():
    with guarded("echo out; echo err >&2; echo out") as guard:
        assert guard.communicate()[0] == "out\nerr\nout\n"


@pytest.mark.parametrize("ending", ["exit 0", "kill -9 $$"])
def test_children_end_with_their_rank(tmp_path, ending):
    with guarded(LEAVE_CHILD.format(tmp_path / "pid") + ending):
        child = pid_in(tmp_path / "pid")
    assert wait_for(lambda: not is_running(child))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_the_rank_and_all_its_children(tmp_path, number):
    with guarded(LEAVE_CHILD.format(tmp_path / "pid") + "exec sleep 600") as guard:
        child = pid_in(tmp_path / "pid")
        guard.send_signal(number)
    assert guard.returncode == -number
    assert wait_for(lambda: not is_running(child))


def test_a_rank_may_answer_sigterm_in_its_own_time():
    """As Megatron does with --exit-signal-handler, to save a checkpoint first."""
    with guarded("trap 'echo saved; exit 3' TERM; echo ready; while :; do sleep 0.05; done") as g:
        assert g.stdout.readline() == "ready\n"
        g.terminate()
        assert "saved\n" in g.stdout.read()  # the shell may first report its own child
    assert g.returncode == 3


def test_a_launcher_killed_with_sigkill_takes_rank_and_children_along(tmp_path):
    rank = LEAVE_CHILD.format(tmp_path / "child") + LEAVE_CHILD.format(tmp_path / "rank").replace(
        "sleep 600 & echo $!", "echo $$"
    )
    code = (
        "import os, subprocess, sys, time\n"
        "subprocess.Popen([*sys.argv[1:5], str(os.getpid()), *sys.argv[5:]])\n"
        "time.sleep(600)"
    )
    command = [sys.executable, "-c", code, *GUARD, "sh", "-c", rank + "exec sleep 600"]
    with subprocess.Popen(command) as launcher:
        pids = [pid_in(tmp_path / "rank"), pid_in(tmp_path / "child")]
        launcher.kill()
    for pid in pids:
        assert wait_for(lambda pid=pid: not is_running(pid))


def test_a_guard_whose_launcher_is_gone_already_starts_nothing(tmp_path):
    command = [*GUARD, str(os.getppid()), "touch", str(tmp_path / "started")]
    assert subprocess.run(command).returncode == -signal.SIGUSR1
    assert not (tmp_path / "started").exists()


def test_a_rank_ends_by_sigint_also_where_the_launcher_ignores_it(tmp_path):
    """A shell starts background jobs with SIGINT ignored; forwarded to a rank, it still ends it."""
    command = [*GUARD, str(os.getpid()), "sh", "-c", "echo ready; exec sleep 600"]
    ignoring = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        guard = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, ignoring)
    with guard:
        assert guard.stdout.readline() == "ready\n"
        guard.send_signal(signal.SIGINT)
    assert guard.returncode == -signal.SIGINT
