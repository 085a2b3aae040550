"""Starting the ranks of a run on this host, following them, and ending them together.

Every rank runs under :mod:`moe_optim.commands.train.rank_guard`, so nothing of it outlives this
process, however it ends.
"""

import contextlib
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing import (
    LogsDest,
    LogsSpecs,
    RunProcsResult,
    SignalException,
    start_processes,
)
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from moe_optim.checkpoint.files.publishing import tells_of_full_disk
from moe_optim.commands.train import rank_guard
from moe_optim.commands.train.progress import Display, LogTail, TrainingState

_POLL_SECONDS = 0.2
_SECONDS_TO_STOP = 10
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_LOG_TAIL_BYTES = 256 * 2**10

_RANK_PREFIX = re.compile(r"^\[rank\d+\]:\s?")  # torch puts it before tracebacks
_ERROR_LINE = re.compile(
    r"^(?:\S+: )?error: (.+)|^([\w.]*(?:Error|Exception|Interrupt|Exit)(?:: .*)?)$"
)
_LOST_PEER = re.compile(
    r"connection (closed|reset|refused)|broken pipe|by peer|gloo|nccl|socket|\b(tcp)?store\b",
    re.IGNORECASE,
)
_TORCH_SAVE_FAILED = re.compile(r"PytorchStreamWriter failed|inline_container")
"""It does not say why it could not write."""


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """What to run, how often and where it writes."""

    entry: Sequence[str]
    """Command of one rank; who it is, it learns from the environment."""
    ranks: int
    logs: Path
    """Folder for ``rank0.log``, ``rank1.log``, ...; created."""
    cpu: bool
    """Run on Megatron's CPU runtime instead of GPUs."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Set for every rank, over what the launcher itself sets."""

    def log(self, rank: int) -> Path:
        """Return where stdout and stderr of ``rank`` go."""
        return self.logs / f"rank{rank}.log"


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """The rank that failed first, and what it said."""

    rank: int
    exit_code: int
    """Negative: the signal that ended it. Zero: it left while others needed it."""
    reason: str
    """Its last error line; empty where it left none. Of a rank that left, who lost it and how."""
    log: Path
    disk_full: bool
    """Whether any rank said that the disk is full."""

    def sentence(self) -> str:
        """Say in one line which rank ended how and why."""
        if self.exit_code < 0:
            ended = f"was ended by {signal.Signals(-self.exit_code).name}"
            if self.exit_code == -signal.SIGKILL and not self.reason:
                return f"rank {self.rank} {ended}: killed from outside, or out of memory."
        elif self.exit_code == 0:
            return (
                f"rank {self.rank} left first: it ended with exit code 0 before the end of the "
                f"run, and {self.reason}"
            )
        else:
            ended = f"ended with exit code {self.exit_code}"
        return f"rank {self.rank} {ended}: {self.reason or 'it left no error message'}"


@dataclass(frozen=True, kw_only=True)
class LaunchResult:
    """How a launch ended."""

    state: TrainingState
    """Everything the log said."""
    seconds: float
    """Wall-clock time from the start of the ranks to their end, imports included."""
    failure: RankFailure | None = None
    stopped_by: signal.Signals | None = None
    """The signal this process was asked to stop with."""


def launch(plan: LaunchPlan, console: Console) -> LaunchResult:
    """Run all ranks to their end, showing progress; no rank is left when this returns.

    The first rank to fail, and a signal to this process, end all others.

    Raises:
        OSError: a log cannot be created.
    """
    state = TrainingState()
    tails = [LogTail(plan.log(rank)) for rank in sorted({0, plan.ranks - 1})]
    started = time.monotonic()
    device = "the CPU" if plan.cpu else "GPUs"
    what = f"{plan.ranks} rank{'s' if plan.ranks > 1 else ''} on {device}"
    failure: RankFailure | None = None
    stopped_by: signal.Signals | None = None
    done: dict[int, None] = {}  # ranks that ended without an error, in their order
    with _handlers_restored(), _elastic_silenced():
        try:
            with _ranks(plan) as context, Display(console, state, what) as display:
                while True:
                    done |= dict.fromkeys(_ended_well(context))  # before torch ends the others
                    if (result := context.wait(timeout=0)) is not None:
                        break
                    _follow(tails, state)
                    display.update()
                    time.sleep(_POLL_SECONDS)
                _follow(tails, state)
                display.update()
                failure = _first_failure(plan, result, list(done))
        except SignalException as stop:
            stopped_by = stop.sigval
    seconds = time.monotonic() - started
    return LaunchResult(state=state, seconds=seconds, failure=failure, stopped_by=stopped_by)


def _follow(tails: Sequence[LogTail], state: TrainingState) -> None:
    for tail in tails:
        for line in tail.new_lines():
            state.read(line)


@contextlib.contextmanager
def _ranks(plan: LaunchPlan) -> Iterator[SubprocessContext]:
    """Start the ranks; none of them is left when the ``with`` ends, in whatever way."""
    plan.logs.mkdir(parents=True, exist_ok=True)
    # The ranks meet at our store: a port that is only looked up for them may be taken by then.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    guard = ("-I", "-S", rank_guard.__file__, str(os.getpid()), *plan.entry)
    context = start_processes(
        name="rank",
        entrypoint=sys.executable,
        args=dict.fromkeys(range(plan.ranks), guard),
        envs=rank_environments(plan, store.port),
        logs_specs=_OneLogARank(plan),
    )
    assert isinstance(context, SubprocessContext)  # what torch makes of a command
    try:
        yield context
    finally:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # ending the ranks is not to be interrupted
        context.close(signal.SIGTERM, _SECONDS_TO_STOP)
        del store  # it serves until here


def rank_environments(plan: LaunchPlan, port: int) -> dict[int, dict[str, str]]:
    """Return what every rank's environment has besides this process's own.

    ``port`` is where this process serves the store that the ranks meet at, as torchrun's does.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    common = {
        "WORLD_SIZE": str(plan.ranks),
        "LOCAL_WORLD_SIZE": str(plan.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": str(max(1, (cores or 1) // plan.ranks)),
        "PYTHONUNBUFFERED": "1",
    }
    if plan.cpu:
        common |= {"MOE_OPTIM_CPU": "1", "TORCHDYNAMO_DISABLE": "1"}
    else:  # Megatron's tensor parallelism asserts it before Blackwell
        common["CUDA_DEVICE_MAX_CONNECTIONS"] = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    common |= plan.environment
    return {
        rank: {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(plan.ranks)
    }


class _OneLogARank(LogsSpecs):
    """Sends a rank's output to ``rank<N>.log``; the guard joins stderr to it."""

    def __init__(self, plan: LaunchPlan) -> None:
        super().__init__(log_dir=str(plan.logs))
        self._plan = plan

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return the destination of every rank."""
        unused = dict.fromkeys(envs, "")
        logs = {rank: str(self._plan.log(rank)) for rank in envs}
        return LogsDest(stdouts=logs, stderrs=unused, error_files=dict(unused))

    @property
    def root_log_dir(self) -> str:
        """Folder of all logs."""
        return str(self._plan.logs)


def _ended_well(context: SubprocessContext) -> list[int]:
    """Return the ranks that have ended with exit code 0."""
    handlers = context.subprocess_handlers
    return [rank for rank in sorted(handlers) if handlers[rank].proc.poll() == 0]


def _first_failure(
    plan: LaunchPlan, result: RunProcsResult, done: Sequence[int]
) -> RankFailure | None:
    """Return the failure that the others followed from; torch lists them as it found them.

    ``done`` are ranks that had ended with exit code 0 by then, the first one first.
    """
    tails = {rank: _tail(plan.log(rank)) for rank in result.failures}
    disk_full = any(
        tells_of_full_disk(text) or _TORCH_SAVE_FAILED.search(text) for text in tails.values()
    )
    failures = [
        RankFailure(
            rank=rank,
            exit_code=failure.exitcode,
            reason="" if failure.exitcode == -signal.SIGKILL else last_error(tails[rank]),
            log=plan.log(rank),
            disk_full=disk_full,
        )
        for rank, failure in result.failures.items()
    ]
    first = min(failures, key=_likely_consequence, default=None)
    if first is not None and done and _LOST_PEER.search(first.reason):
        reason = f"rank {first.rank} lost it: {first.reason}"
        return replace(first, rank=done[0], exit_code=0, reason=reason, log=plan.log(done[0]))
    return first


def _likely_consequence(failure: RankFailure) -> tuple[bool, bool]:
    # SIGTERM is what the launcher sends to the others, perhaps to one that was busy failing
    was_asked_to_stop = failure.exit_code == -signal.SIGTERM
    lost_peer = _LOST_PEER.search(failure.reason) is not None
    return lost_peer or (was_asked_to_stop and not failure.reason), was_asked_to_stop


def _tail(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LOG_TAIL_BYTES))
        return file.read().decode(errors="replace")


def last_error(log_text: str) -> str:
    """Return the last ``error:`` or exception line of a log, or an empty string."""
    for line in reversed(log_text.splitlines()):
        if found := _ERROR_LINE.match(_RANK_PREFIX.sub("", line)):
            return (found[1] or found[2]).strip()
    return ""


@contextlib.contextmanager
def _handlers_restored() -> Iterator[None]:
    """Undo the signal handlers that torch installs when it starts processes."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _elastic_silenced() -> Iterator[None]:
    """Keep torch's own account of failing ranks from the terminal: we give ours."""
    logger = logging.getLogger("torch.distributed.elastic")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)
