"""Which code measured or planned something, and where."""

import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

from moe_optim.commands.console.kernel_hash import hash_kernels, kernel_sources
from moe_optim.environment import find_gpus, find_versions


def begin_report(command: str, *, on_gpu: bool, ranks: int = 1) -> dict[str, Any]:
    """Return what a report of measured figures begins with: who wants to measure again needs it.

    Args:
        command: that measures the same.
        on_gpu: whether GPUs measure, or the CPU.
        ranks: that measure, each with a GPU of its own.

    Returns:
        ``command``, ``commit``, ``device`` and ``versions``, for JSON; of GPUs also ``kernels``.
    """
    return {"command": command, **describe_environment(on_gpu=on_gpu, ranks=ranks)}


def describe_environment(*, on_gpu: bool, ranks: int = 1) -> dict[str, Any]:
    """Return ``commit``, ``device`` and ``versions``: the code, what computes, and with what.

    Of GPUs also ``kernels``, see :func:`kernels`.
    """
    return {
        "commit": commit(),
        "device": _describe_gpus(ranks) if on_gpu else describe_cpu(),
        "versions": find_versions(),
        **kernels(on_gpu=on_gpu),
    }


def kernels(*, on_gpu: bool) -> dict[str, str]:
    """Return ``kernels``, a hash of their code, for a report of a GPU; else nothing."""
    return {"kernels": hash_kernels(kernel_sources())} if on_gpu else {}


def _describe_gpus(count: int) -> str:
    """Return which GPUs the first ones are, with their number if there are several."""
    used = [gpu.name for gpu in find_gpus()][:count]
    alike = {name: used.count(name) for name in used}
    return ", ".join(f"{n} x {name}" if n > 1 else name for name, n in alike.items())


def describe_cpu() -> str:
    """Return which kind of CPU this is, and how many cores it has."""
    return f"{platform.machine()} CPU, {os.cpu_count()} cores"


def commit() -> str | None:
    """Return the commit of this checkout, ``-dirty`` where it was changed; None without git."""
    commit = _git("rev-parse", "--short", "HEAD")
    return f"{commit}-dirty" if commit and _git("status", "--porcelain") else commit


def _git(*words: str) -> str | None:
    if shutil.which("git") is None:
        return None
    command = ["git", "-C", str(Path(__file__).parent), *words]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() or None
