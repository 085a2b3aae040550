"""The ranks of a launch start together and end together, and the culprit is named."""

import contextlib
import os
import signal
import sys
import threading

from moe_optim.commands.train import launcher
from moe_optim.commands.train.launcher import launch, rank_environment
from tests.support.training_runs.runs import FAKE_RANK, REPOSITORY, is_running, wait_for


def start(tmp_path, behaviour="", command=None, ranks=2):
    own = {"FAKE_RANK": behaviour, "FAKE_PIDS": str(tmp_path), "PYTHONPATH": str(REPOSITORY)}
    return launch(
        command or [sys.executable, "-m", FAKE_RANK],
        ranks=ranks,
        logs=tmp_path / "logs",
        environment=rank_environment(ranks, cpu=True) | own,
    )


@contextlib.contextmanager
def when_all_hang(tmp_path, act, ranks=2):
    """Call ``act`` with all process ids once every fake rank hangs."""
    pids = []

    def watch():
        files = [tmp_path / str(rank) for rank in range(ranks)]
        wait_for(lambda: all(file.exists() for file in files), 120)
        pids.extend(int(file.read_text()) for file in files)
        act(pids)

    thread = threading.Thread(target=watch)
    thread.start()
    yield
    thread.join()
    assert len(pids) == ranks
    for pid in pids:
        assert wait_for(lambda pid=pid: not is_running(pid))


def test_ranks_know_who_they_are_and_the_last_one_is_shown(tmp_path, capfd):
    code = "import os; print('rank', os.environ['RANK'], os.environ['MOE_OPTIM_CPU'])"
    result = start(tmp_path, command=[sys.executable, "-c", code], ranks=3)
    assert (result.failure, result.stopped_by) == (None, None)
    for rank in range(3):
        assert (result.logs / str(rank) / "stdout.log").read_text() == f"rank {rank} 1\n"
    assert capfd.readouterr().out == "[rank2]:rank 2 1\n"
    assert "MOE_OPTIM_CPU" not in os.environ


def test_logs_are_found_under_the_id_of_a_standalone_torchrun(tmp_path, monkeypatch):
    monkeypatch.setenv("PET_STANDALONE", "1")
    result = start(tmp_path, command=[sys.executable, "-c", "print('here')"])
    assert result.failure is None
    assert (result.logs / "1" / "stdout.log").read_text() == "here\n"


def test_the_rank_that_failed_first_is_named_not_those_that_lost_it(tmp_path):
    failure = start(tmp_path, "raise").failure
    assert failure.sentence() == "rank 0 ended with exit code 1: ValueError: no weight"
    assert (failure.logs / "stderr.log").is_file()


def test_killing_one_rank_ends_all_and_says_which(tmp_path):
    with when_all_hang(tmp_path, lambda pids: os.kill(pids[0], signal.SIGKILL)):
        failure = start(tmp_path, "hang").failure
    assert failure.sentence() == (
        "rank 0 ended with SIGKILL: killed from outside, or out of memory"
    )


def test_a_signal_to_the_launcher_ends_all_ranks_and_restores_the_handlers(tmp_path):
    number = signal.SIGINT
    before = signal.signal(number, signal.default_int_handler)  # a shell may have it ignored
    try:
        with when_all_hang(tmp_path, lambda _: os.kill(os.getpid(), number)):
            result = start(tmp_path, "hang")
        assert signal.getsignal(number) == signal.default_int_handler
    finally:
        signal.signal(number, before)
    assert (result.stopped_by, result.failure) == (number, None)


def test_a_run_under_nohup_outlives_its_terminal(tmp_path, monkeypatch):
    handled = []

    def keep(args):
        handled.append(args.signals_to_handle)
        (tmp_path / "logs" / "launch_0" / "attempt_0").mkdir(parents=True)

    monkeypatch.setattr(launcher, "run", keep)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        start(tmp_path)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert "SIGTERM" in handled[0] and "SIGHUP" not in handled[0]
