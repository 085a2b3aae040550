"""A save that is killed at any of its calls into the file system, as often as wanted.

``kill_saves`` runs inside a rank that is about to save. Each attempt is a process of its own,
forked where everything is built, and ends by SIGKILL right before one of the calls that change the
folder of checkpoints: what buffers of the process hold is lost, what the kernel got stays. A write
that is killed has written half of its bytes.
"""

import builtins
import io
import os
import random
import shutil
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

CALLS = ("mkdir", "rename", "replace", "unlink", "remove", "rmdir", "fsync", "truncate")


class FileSystemCalls:
    """Counts the calls that change files below a folder, and kills this process at one of them.

    Args:
        folder: calls on other paths do not count.
        kill_at: number of the call, from 0, that is not done any more; None for none.
    """

    def __init__(self, folder: Path, kill_at: int | None) -> None:
        self.folder, self.kill_at = os.fspath(folder), kill_at
        self.calls: list[str] = []

    def install(self) -> None:
        """Replace ``open`` and the functions of ``os`` for the rest of the process."""
        builtins.open = io.open = self._open
        for name in CALLS:
            setattr(os, name, self._counted(name, getattr(os, name)))

    def happen(self, call: str, last_act: Callable[[], Any] = lambda: None) -> None:
        """Count a call that is about to be done, or do ``last_act`` and die."""
        if len(self.calls) == self.kill_at:
            last_act()
            os.kill(os.getpid(), signal.SIGKILL)
        self.calls.append(call)

    def _is_ours(self, path: Any) -> bool:
        if isinstance(path, int):
            path = Path(f"/proc/self/fd/{path}").readlink()
        return isinstance(path, str | os.PathLike) and os.fspath(path).startswith(self.folder)

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(path: Any, *args: Any, **kwargs: Any) -> Any:
            if self._is_ours(path):
                self.happen(name)
            return function(path, *args, **kwargs)

        return counted

    def _open(self, path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if not self._is_ours(path) or not set(mode) & set("wax+"):
            return OPEN(path, mode, *args, **kwargs)
        self.happen("open")
        raw = _CountedFile(path, mode.replace("t", ""), self)
        buffered = io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered)


class _CountedFile(io.FileIO):
    """A file whose writes and whose end are calls that count."""

    def __init__(self, path: Any, mode: str, calls: FileSystemCalls) -> None:
        super().__init__(path, mode.replace("b", ""))
        self._calls = calls

    def write(self, content: Any) -> int:
        half = bytes(memoryview(content)[: len(content) // 2])
        self._calls.happen("write", lambda: super(_CountedFile, self).write(half))
        return super().write(content)

    def close(self) -> None:
        if not self.closed:
            self._calls.happen("close")
        super().close()


OPEN = io.open


def kill_saves(
    save: Callable[[], Any],
    folder: Path,
    results: Path,
    choose: Callable[[list[str]], list[int]],
) -> list[str]:
    """Save once to the end, and then again and again, killed at each call that ``choose`` names.

    Every attempt finds ``folder`` as it is now, and leaves what it left as ``results/<call>``; the
    one that was not killed leaves ``results/whole``.

    Args:
        save: what training would call now. One rank alone: its collectives become no-ops, as the
            threads of gloo do not survive a fork.
        folder: ``--save``.
        results: a new folder on the same file system.
        choose: from the names of all calls, the numbers of those to be killed at.

    Returns:
        The names of all calls of the save, in order.
    """
    results.mkdir()
    before = results / "before"
    shutil.copytree(folder, before)
    calls = _attempt(save, folder, None)
    folder.rename(results / "whole")
    for number in choose(calls):
        shutil.copytree(before, folder)
        _attempt(save, folder, number)
        folder.rename(results / f"{number:04d}")
    shutil.copytree(before, folder)
    return calls


def _attempt(save: Callable[[], Any], folder: Path, kill_at: int | None) -> list[str]:
    reader, writer = os.pipe()
    numbers = random.getstate()  # a fork draws others, and they are saved
    child = os.fork()
    if child == 0:
        random.setstate(numbers)
        os.close(reader)
        _save_and_die(save, FileSystemCalls(folder, kill_at), writer)
    os.close(writer)
    with OPEN(reader) as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    expected = 0 if kill_at is None else -signal.SIGKILL
    assert os.waitstatus_to_exitcode(status) == expected, f"killed at {kill_at}: {said}"
    return said.split()


def _save_and_die(save: Callable[[], Any], calls: FileSystemCalls, writer: int) -> None:
    try:
        _be_alone()
        calls.install()
        save()
        os.write(writer, " ".join(calls.calls).encode())
        os._exit(0)
    except BaseException:
        os.write(writer, traceback.format_exc().encode())
        os._exit(1)


def _be_alone() -> None:
    """Replace collectives by what they do on one rank."""

    def nothing(*_args: Any, **_kwargs: Any) -> None:
        return None

    def gather(obj: Any, object_gather_list: list[Any] | None = None, *_: Any, **__: Any) -> None:
        if object_gather_list is not None:
            object_gather_list[0] = obj

    for name in ("barrier", "all_reduce", "broadcast", "broadcast_object_list"):
        setattr(dist, name, nothing)
    dist.gather_object = gather
    dist.all_gather_object = lambda object_list, obj, *_, **__: gather(obj, object_list)
    dist.all_gather_into_tensor = lambda output, input, *_, **__: output.copy_(input)
