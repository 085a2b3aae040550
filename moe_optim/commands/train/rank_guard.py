"""Run one rank of a launch so that nothing of it outlives the launcher.

A rank has children of its own (data loaders, the queue server of the checkpoint writer) that a
killed rank leaves behind. So each rank runs in a process group of its own under this small
parent, which ends the whole group when the rank ends, however it ends, and when the launcher
dies, SIGKILL included. :mod:`moe_optim.commands.train.launcher` starts this file by path, isolated
and without ``site``: only the standard library may be imported here.

Usage: ``python -I -S rank_guard.py LAUNCHER_PID COMMAND [ARGUMENT ...]``
"""

import contextlib
import ctypes
import os
import resource
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LAUNCHER_DIED = signal.SIGUSR1
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def die_with_parent(parent: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send ``by`` to this process once process ``parent`` is gone.

    Args:
        parent: process id of the direct parent. Where it is gone already, ``by`` is sent at
            once; on other systems than Linux that check is all there is.
        by: the signal; it survives ``exec``.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, int(by))
    if os.getppid() != parent:
        os.kill(os.getpid(), by)


def main(launcher: int, command: Sequence[str]) -> NoReturn:
    """Run ``command`` with its stderr joined to its stdout, and end as it ends."""
    os.dup2(1, 2)
    die_with_parent(launcher, _LAUNCHER_DIED)  # no handler yet: it ends this process, as it should
    held = {_LAUNCHER_DIED, *_FORWARDED}
    signal.pthread_sigmask(signal.SIG_BLOCK, held)
    guard = os.getpid()
    rank = os.fork()
    if rank == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, held)
        _become(command, guard)
    _lead_own_group(rank)
    _install_handlers(rank)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, held)
    _, status = os.waitpid(rank, 0)
    _signal_group(rank, signal.SIGKILL)  # what the rank left behind
    _end_like(status)


def _become(command: Sequence[str], guard: int) -> NoReturn:
    _lead_own_group(0)
    die_with_parent(guard)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs start ignoring it
    try:
        os.execvp(command[0], list(command))
    except OSError as error:
        print(f"error: {command[0]}: cannot be started: {error.strerror}", flush=True)
        os._exit(127)


def _lead_own_group(pid: int) -> None:
    """Make ``pid`` the leader of its group; called on both sides of the fork, first come."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.setpgid(pid, pid)


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _install_handlers(rank: int) -> None:
    def forward(number: int, _frame: FrameType | None) -> None:
        _signal_group(rank, number)

    def end_all(_number: int, _frame: FrameType | None) -> None:
        _signal_group(rank, signal.SIGKILL)
        os._exit(1)

    for number in _FORWARDED:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, forward)
    signal.signal(_LAUNCHER_DIED, end_all)


def _end_like(status: int) -> NoReturn:
    """End this process with the exit code or by the signal that ended the rank."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the rank's own core is the useful one
        with contextlib.suppress(OSError):  # SIGKILL has no handler to take away
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 1)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
