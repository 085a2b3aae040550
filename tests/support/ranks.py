"""Runs a function on several gloo ranks, each a process of its own forked after the imports."""

import contextlib
import faulthandler
import io
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.distributed import TCPStore, distributed_c10d

TIMEOUT_S = 180
_SHOW_STACKS = signal.SIGUSR1


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = TIMEOUT_S,
    shares_device: bool = True,
) -> list[Any]:
    """Call ``function(*args)`` on every rank and return what each returned, rank 0 first.

    The environment of a rank is torchrun's. Megatron is imported, nothing is initialised, and the
    CPU runtime is not installed. A rank that raises fails the test with its traceback and output.
    Unless ``shares_device``, each of its process groups has a gloo device of its own.
    """
    context = fork_context()
    # served here, on a port that nobody else can take before the ranks come
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        processes = [
            context.Process(
                target=_rank,
                args=(rank, world_size, store.port, Path(folder), shares_device, function, args),
            )
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout_s
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        late = [rank for rank, process in enumerate(processes) if process.is_alive()]
        codes = [process.exitcode for process in processes]  # of a signal: below zero
        _end([processes[rank].pid for rank in late])
        for process in processes:
            process.join()
        outputs = [_read(Path(folder) / f"{rank}.log") for rank in range(world_size)]
        results = [Path(folder) / f"{rank}.pt" for rank in range(world_size)]
        failed = [rank for rank, path in enumerate(results) if not path.exists()]
        if failed:
            state = f"ranks {failed} failed"
            if late:
                state = (
                    f"ranks {late} did not end within {timeout_s:g} s, stacks at that time below"
                )
            tails = "\n".join(
                f"--- rank {rank}, exit code {codes[rank]}\n{outputs[rank][-6000:]}"
                for rank in failed
            )
            raise AssertionError(f"{state} in {function.__name__}\n{tails}")
        return [torch.load(path, weights_only=False) for path in results]


def on_ranks(world_size: int, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Have a test run on ranks, all of which call it; see :func:`run_ranks` for ``options``.

    Ranks are given what the test is given, pickled.
    """

    def decorate(test: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(test)
        def launch(**given: Any) -> None:
            run_ranks(world_size, _call_test, test.__module__, test.__name__, given, **options)

        return launch

    return decorate


def sharing_a_rank(prepare: Callable[[], object]) -> Callable[[Callable[[], object]], Any]:
    """Return what has tests without arguments run on one rank a file, after ``prepare()``.

    Launching a rank is dearer than most of them. Each test fails by itself.
    """
    marked: dict[str, list[str]] = {}

    @cache
    def outcomes(module: str) -> dict[str, str]:
        (found,) = run_ranks(1, _call_tests, prepare, module, marked[module])
        return found

    def mark(test: Callable[[], object]) -> Any:
        marked.setdefault(test.__module__, []).append(test.__name__)

        @wraps(test)
        def look() -> None:
            failure = outcomes(test.__module__)[test.__name__]
            assert not failure, failure

        return look

    return mark


def _call_tests(prepare: Callable[[], object], module: str, names: list[str]) -> dict[str, str]:
    prepare()
    failures = dict.fromkeys(names, "")
    for name in names:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            try:
                _call_test(module, name, {})
            except (Exception, pytest.fail.Exception):
                failures[name] = f"{said.getvalue()}{traceback.format_exc()}"
    return failures


def _call_test(module: str, name: str, given: dict[str, Any]) -> None:
    """Call a test; where it fails, print what its last line saw: pytest rewrites no assert here."""
    try:
        vars(import_module(module))[name].__wrapped__(**given)
    except (AssertionError, pytest.fail.Exception):
        frames = [frame for frame, _ in traceback.walk_tb(sys.exc_info()[2])]
        *_, last = (frame for frame in frames if frame.f_globals["__name__"] == module)
        for local, value in last.f_locals.items():
            print(f"{local} = {value!r:.300}")
        raise


def fork_context() -> Any:
    """Return what starts processes in which Megatron is imported already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preload"])
    return context


def _rank(
    rank: int,
    world_size: int,
    port: int,
    folder: Path,
    shares_device: bool,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    log = (folder / f"{rank}.log").open("w", buffering=1)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(log.fileno(), stream.fileno())
    faulthandler.enable()
    faulthandler.register(_SHOW_STACKS)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    try:
        if shares_device:
            _share_device()
        result = function(*args)
        torch.save(result, folder / f"{rank}.tmp")
        (folder / f"{rank}.tmp").rename(folder / f"{rank}.pt")
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        _kill(psutil.Process().children(recursive=True))
    os._exit(0)  # the result is written; gloo threads need no goodbye


def _share_device() -> None:
    """Let all process groups of gloo share a device.

    Each has one of its own otherwise, whose thread wakes a hundred times a second: those of
    Megatron's groups take more of a processor than what the ranks compute.
    """
    stock = distributed_c10d.ProcessGroupGloo
    device = cache(stock.create_default_device)  # a rank may fork before it has groups

    class SharedDevice(stock):
        def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
            options = stock._Options()
            options._devices, options._timeout = [device()], timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = SharedDevice


def _end(ranks: list[int]) -> None:
    """Have ranks write where they are, and end them at once: none is left to lose a peer."""
    for pid in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, _SHOW_STACKS)
    time.sleep(0.5 if ranks else 0)  # for faulthandler, which is a matter of milliseconds
    families = [psutil.Process(pid) for pid in ranks if psutil.pid_exists(pid)]
    children = [child for rank in families for child in rank.children(recursive=True)]
    _kill([*families, *children])


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
