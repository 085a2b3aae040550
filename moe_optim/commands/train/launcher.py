"""Starts the ranks of a run on this machine with torchrun, and names the one that failed."""

import contextlib
import logging
import os
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import parse_args, run

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_LOST_PEER = re.compile(
    r"connection (closed|reset|refused)|broken pipe|by peer|gloo|nccl|socket|\b(tcp)?store\b",
    re.IGNORECASE,
)


class RankFailure(NamedTuple):
    """The first rank that failed."""

    rank: int
    reason: str
    """Exit code or signal, and the recorded error, ``Type: message``."""
    logs: Path
    """Folder with ``stdout.log`` and ``stderr.log`` of the rank."""

    def sentence(self) -> str:
        """Return one line with rank and reason."""
        return f"rank {self.rank} ended with {self.reason}"


class LaunchResult(NamedTuple):
    """Result of a launch whose ranks have all ended."""

    logs: Path
    """Folder with ``<rank>/stdout.log`` and ``<rank>/stderr.log``."""
    failure: RankFailure | None
    stopped_by: signal.Signals | None
    """Signal that stopped this process."""


def launch(
    command: Sequence[str],
    *,
    ranks: int,
    logs: Path,
    environment: Mapping[str, str],
    is_shown: bool = True,
) -> LaunchResult:
    """Run a command as ranks on one machine until all end or one fails.

    A failed rank, or a signal to this process, ends all other ranks. ``logs`` gets the logs of all
    launches; if ``is_shown``, the last rank, which logs losses, also prints to this terminal.
    """
    # torchrun would catch signals that nohup or a shell has set to be ignored
    heard = [one.name for one in _SIGNALS if signal.getsignal(one) != signal.SIG_IGN]
    options = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv-id=launch"]
    options += ["--local-addr=127.0.0.1", f"--nproc-per-node={ranks}", "--role=rank"]
    options += [f"--signals-to-handle={','.join(heard)}"]
    options += [f"--log-dir={logs}", "--redirects=3", f"--tee={int(is_shown)}"]
    options += [f"--local-ranks-filter={ranks - 1}", "--no-python"]
    failures: Mapping[int, ProcessFailure] = {}
    stopped_by = None
    with _changed_process(environment):
        try:
            run(parse_args([*options, *command]))
        except ChildFailedError as error:
            failures = error.failures
        except SignalException as stop:
            stopped_by = stop.sigval
    # PET_STANDALONE in the environment replaces the id of the launch, which begins its folder
    newest = max(logs.glob("*/attempt_0"), key=lambda path: path.stat().st_mtime)
    found = [
        (_is_consequence(one, reason := _reason(one)), one.timestamp, rank, reason)
        for rank, one in failures.items()
    ]
    if not found:
        return LaunchResult(newest, None, stopped_by)
    *_, rank, reason = min(found)
    return LaunchResult(newest, RankFailure(rank, reason, newest / str(rank)), stopped_by)


def _is_consequence(failure: ProcessFailure, reason: str) -> bool:
    """Return whether a rank lost a peer, or was stopped since another failed."""
    return failure.exitcode == -signal.SIGTERM or bool(_LOST_PEER.search(reason))


def _reason(failure: ProcessFailure) -> str:
    if failure.exitcode == -signal.SIGKILL:
        return "SIGKILL: killed from outside, or out of memory"
    ended = failure.signal_name() if failure.exitcode < 0 else f"exit code {failure.exitcode}"
    recorded = failure.error_file_data["message"]
    said = str(recorded["message"]).strip() if isinstance(recorded, dict) else ""
    return f"{ended}: {said or 'its log tells why'}"


def rank_environment(ranks: int, *, cpu: bool) -> dict[str, str]:
    """Return the environment variables that Megatron's ranks need on one machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    common = {
        "OMP_NUM_THREADS": str(max(1, (cores or 1) // ranks)),
        "PYTHONUNBUFFERED": "1",
        # Megatron's default, which absl, imported by emerging-optimizers, would raise
        "MEGATRON_LOGGING_LEVEL": os.environ.get("MEGATRON_LOGGING_LEVEL", "20"),
    }
    if cpu:
        return common | {"MOE_OPTIM_CPU": "1", "TORCHDYNAMO_DISABLE": "1"}
    # Megatron's tensor parallelism asserts it before Blackwell.
    one_queue = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    return common | {"CUDA_DEVICE_MAX_CONNECTIONS": one_queue}


@contextlib.contextmanager
def _changed_process(environment: Mapping[str, str]) -> Iterator[None]:
    """Set variables for ranks to inherit, and keep the log of torch's agent off the terminal.

    Restores both, and the signal handlers, afterwards. The result of a launch has all of the log.
    """
    logger, nowhere = logging.getLogger("torch.distributed.elastic"), logging.NullHandler()
    variables, propagates = dict(os.environ), logger.propagate
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    os.environ.update(environment)
    logger.propagate = False
    logger.addHandler(nowhere)  # without any handler, Python itself prints warnings
    try:
        yield
    finally:
        logger.removeHandler(nowhere)
        logger.propagate = propagates
        os.environ.clear()
        os.environ.update(variables)
        for number, handler in handlers.items():
            signal.signal(number, handler)
