"""Starts ranks that run a stack, and says where a rank stopped."""

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

STOPPED = "stopped"
"""Key of a result, in place of all others, that says where and why a rank stopped."""
THROUGH = ("torch/", "moe_optim/integration/cpu_runtime.py")
"""Files that pass calls on, and tell nothing of who made them."""


def run_ranks(
    count: int,
    log: Path,
    function: Callable[..., dict[str, Any]],
    *args: Any,
    start_method: str = "fork",
) -> dict[str, Any]:
    """Return what ``function(*args)`` gives on rank 0 of ``count`` ranks.

    If a rank raises, the others are ended, and the result has :data:`STOPPED` alone.

    Args:
        count: number of ranks.
        log: folder for the output of each rank, ``0.log`` and so on.
        function: function of every rank, whose result JSON can hold.
        args: arguments of the function.
        start_method: "fork", from a process that has imported the stack, or "spawn" for GPUs.
    """
    log.mkdir(parents=True, exist_ok=True)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="stacks-") as folder:
        found = Path(folder)
        try:
            torch.multiprocessing.start_processes(
                _rank,
                (count, store.port, found, log, function, args),
                count,
                start_method=start_method,
            )
        except Exception as error:  # of a rank; the file has its words, unless it was killed
            reasons = [path.read_text() for path in sorted(found.glob("*.stopped"))]
            return {STOPPED: reasons[0] if reasons else str(error)}
        result: dict[str, Any] = json.loads((found / "0.json").read_text())
        return result


def _rank(
    rank: int,
    count: int,
    port: int,
    found: Path,
    log: Path,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    stream = (log / f"{rank}.log").open("w", buffering=1)
    for output in (sys.stdout, sys.stderr):
        os.dup2(stream.fileno(), output.fileno())
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    try:
        (found / f"{rank}.json").write_text(json.dumps(function(*args)))
    except (Exception, SystemExit) as error:  # Megatron exits where it compiles its helper
        traceback.print_exc()
        (found / f"{rank}.stopped").write_text(where_it_stopped(error))
        raise


def where_it_stopped(error: BaseException) -> str:
    """Return ``file:line: error``, the file from its package on, of the innermost frame.

    Frames of :data:`THROUGH` count only if there is no other.
    """
    root = f"{Path(__file__).parents[2]}/"
    frames = [
        (frame.filename.rpartition("site-packages/")[2].removeprefix(root), frame.lineno)
        for frame in traceback.extract_tb(error.__traceback__)
    ]
    outside = [frame for frame in frames if not frame[0].startswith(THROUGH)]
    place, line = (outside or frames)[-1]
    message = str(error).strip().partition("\n")[0]
    return f"{place}:{line}: {type(error).__name__}: {message}"
