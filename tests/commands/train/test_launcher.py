"""The ranks of a launch start together and end together, and the culprit is named."""

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading

import pytest
from rich.console import Console

from moe_optim.commands.train.launcher import LaunchPlan, last_error, launch, rank_environments
from tests.support.training_runs.runs import FAKE_RANK, REPOSITORY, is_running, wait_for


def plan_for(tmp_path, behaviour="", entry=FAKE_RANK, ranks=2):
    return LaunchPlan(
        entry=(*entry, "--tensorboard-dir", str(tmp_path / "tensorboard")),
        ranks=ranks,
        logs=tmp_path / "logs",
        cpu=True,
        environment={"FAKE_RANK": behaviour, "FAKE_PIDS": str(tmp_path)},
    )


def launch_quietly(plan):
    return launch(plan, Console(file=io.StringIO()))


@contextlib.contextmanager
def when_all_hang(tmp_path, act, ranks=2):
    """Call ``act`` with all process ids, children included, once every fake rank hangs."""
    pids = []

    def watch():
        files = [tmp_path / str(rank) for rank in range(ranks)]
        wait_for(lambda: all(file.exists() for file in files), 120)
        pids.extend(int(pid) for file in files if file.exists() for pid in file.read_text().split())
        act(pids)

    thread = threading.Thread(target=watch)
    thread.start()
    yield pids
    thread.join()
    assert len(pids) == 2 * ranks
    for pid in pids:
        assert wait_for(lambda pid=pid: not is_running(pid))


def test_a_launch_that_ends_well_has_followed_the_last_rank(tmp_path):
    result = launch_quietly(plan_for(tmp_path))
    assert (result.failure, result.stopped_by) == (None, None)
    assert (result.state.iteration, result.state.total) == (6, 6)
    assert sorted(result.state.held_out) == [2, 4, 6]
    assert result.state.test_loss == pytest.approx(2.5 + 3.5 * 2.718281828 ** (-0.6), abs=1e-5)
    assert "a warning that stderr gets" in (tmp_path / "logs" / "rank0.log").read_text()


def test_every_rank_knows_who_it_is(tmp_path):
    plan = LaunchPlan(entry=FAKE_RANK, ranks=2, logs=tmp_path, cpu=True, environment={"A": "b"})
    environments = rank_environments(plan, 1234)
    assert [environment["RANK"] for environment in environments.values()] == ["0", "1"]
    assert environments[1]["LOCAL_RANK"] == "1"
    same = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "A": "b"}
    for environment in environments.values():
        assert same.items() <= environment.items()
        assert environment["MASTER_PORT"] == "1234"
        assert environment["TORCHELASTIC_USE_AGENT_STORE"] == "True"  # the launcher serves it
        assert int(environment["OMP_NUM_THREADS"]) >= 1
        assert environment["MOE_OPTIM_CPU"] == environment["TORCHDYNAMO_DISABLE"] == "1"


def test_gpu_ranks_are_not_told_to_use_the_cpu(tmp_path):
    environment = rank_environments(LaunchPlan(entry=(), ranks=1, logs=tmp_path, cpu=False), 1)[0]
    assert not {"MOE_OPTIM_CPU", "TORCHDYNAMO_DISABLE"} & environment.keys()


def test_the_rank_that_failed_first_is_named_not_those_that_lost_it(tmp_path):
    failure = launch_quietly(plan_for(tmp_path, "raise")).failure
    assert (failure.rank, failure.exit_code) == (0, 1)
    assert failure.sentence() == (
        "rank 0 ended with exit code 1: ValueError: expert 3 has no weight"
    )


def test_a_rank_that_left_without_an_error_is_named_not_those_that_lost_it(tmp_path):
    """It is no failure to torch, which had blamed whoever noticed."""
    failure = launch_quietly(plan_for(tmp_path, "leave", ranks=3)).failure
    assert (failure.rank, failure.exit_code) == (0, 0)
    assert failure.log == tmp_path / "logs" / "rank0.log"
    assert re.fullmatch(
        r"rank 0 left first: it ended with exit code 0 before the end of the run, and rank [12] "
        r"lost it: RuntimeError: gloo: Connection closed by peer \[127.0.0.1\]:1234",
        failure.sentence(),
    )


@pytest.mark.parametrize("said", ["cannot close the log", "damaged: restore it from a copy"])
def test_a_rank_that_had_ended_well_is_not_blamed_for_the_failure_of_another(tmp_path, said):
    """Rank 0 is done; rank 1 then fails for a reason of its own, whatever words it has for it."""
    code = (
        "import os, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    time.sleep(1)\n"
        f"    raise ValueError('{said}')\n"
    )
    failure = launch_quietly(plan_for(tmp_path, entry=(sys.executable, "-c", code))).failure
    assert (failure.rank, failure.exit_code) == (1, 1)
    assert failure.reason == f"ValueError: {said}"


def test_an_error_line_is_what_a_rank_wants_said(tmp_path):
    failure = launch_quietly(plan_for(tmp_path, "error")).failure
    assert failure.rank == 1
    assert failure.reason == "--num-experts: expected a multiple of 4, got 6. Change it."


def test_killing_one_rank_ends_all_and_says_which(tmp_path):
    def kill_rank_0(pids):
        os.kill(pids[0], signal.SIGKILL)

    with when_all_hang(tmp_path, kill_rank_0):
        failure = launch_quietly(plan_for(tmp_path, "hang")).failure
    assert (failure.rank, failure.exit_code) == (0, -signal.SIGKILL)
    assert "rank 0 was ended by SIGKILL: killed from outside, or out of memory." in (
        failure.sentence()
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_a_signal_to_the_launcher_ends_all_ranks_and_restores_the_handlers(tmp_path, number):
    before = signal.getsignal(number)
    with when_all_hang(tmp_path, lambda _: os.kill(os.getpid(), number)):
        result = launch_quietly(plan_for(tmp_path, "hang"))
    assert (result.stopped_by, result.failure) == (number, None)
    assert signal.getsignal(number) == before


def test_no_process_is_left_when_the_launcher_is_killed(tmp_path):
    code = (
        "from rich.console import Console; from tests.commands.train.test_launcher import *\n"
        "from pathlib import Path; launch(plan_for(Path(sys.argv[1]), 'hang'), Console())"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL)
    with process as launcher, when_all_hang(tmp_path, lambda _: launcher.kill()):
        pass


LOGS = {
    "the last error line": ("error: one\nwarnings\nerror: two\nbye\n", "two"),
    "argparse": ("usage: x\npretrain.py: error: unrecognized arguments: --foo\n", "unrecognized"),
    "an exception": ("Traceback (most recent call last):\n  x\nValueError: no\n", "ValueError: no"),
    "under torch's prefix": ("[rank1]: Traceback:\n[rank1]: a.b.OddError: x\n", "a.b.OddError: x"),
    "without a message": ("AssertionError\n", "AssertionError"),
    "not a warning": ("x.py:3: UserWarning: careful\n", ""),
    "not a remark": ("Exception ignored in: <function f>\n", ""),
    "nothing": ("", ""),
}


@pytest.mark.parametrize(("log", "expected"), LOGS.values(), ids=LOGS.keys())
def test_the_last_error_of_a_log(log, expected):
    assert last_error(log).startswith(expected)
    assert bool(last_error(log)) == bool(expected)


def test_logs_of_ranks_are_separate(tmp_path):
    show = (sys.executable, "-c", "import os; print(os.environ['RANK'])")
    result = launch_quietly(plan_for(tmp_path, entry=show, ranks=3))
    assert result.failure is None
    logs = {path.name: json.loads(path.read_text()) for path in (tmp_path / "logs").iterdir()}
    assert logs == {f"rank{rank}.log": rank for rank in range(3)}
