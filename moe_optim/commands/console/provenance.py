"""Code version and machine of a measurement or plan."""

import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

from moe_optim.commands.console.kernel_hash import hash_kernels, kernel_sources
from moe_optim.environment import find_gpus, find_versions


def begin_report(command: str, *, on_gpu: bool, ranks: int = 1) -> dict[str, Any]:
    """Return the header of a measurement report.

    Args:
        command: command that repeats the measurement.
        on_gpu: whether the measurement runs on GPUs or on the CPU.
        ranks: number of measuring ranks, one per GPU.

    Returns:
        ``command``, ``commit``, ``device`` and ``versions``, for JSON; on GPUs also ``kernels``.
    """
    return {"command": command, **describe_environment(on_gpu=on_gpu, ranks=ranks)}


def describe_environment(*, on_gpu: bool, ranks: int = 1) -> dict[str, Any]:
    """Return ``commit``, ``device`` and ``versions``; on GPUs also :func:`kernels`."""
    return {
        "commit": commit(),
        "device": _describe_gpus(ranks) if on_gpu else describe_cpu(),
        "versions": find_versions(),
        **kernels(on_gpu=on_gpu),
    }


def kernels(*, on_gpu: bool) -> dict[str, str]:
    """Return ``{"kernels": hash}`` on a GPU, else an empty dict."""
    return {"kernels": hash_kernels(kernel_sources())} if on_gpu else {}


def _describe_gpus(count: int) -> str:
    used = [gpu.name for gpu in find_gpus()][:count]
    alike = {name: used.count(name) for name in used}
    return ", ".join(f"{n} x {name}" if n > 1 else name for name, n in alike.items())


def describe_cpu() -> str:
    """Return the CPU model and number of cores."""
    return f"{platform.machine()} CPU, {os.cpu_count()} cores"


def commit() -> str | None:
    """Return the commit of this checkout, with ``-dirty`` if it was modified; None without git."""
    commit = _git("rev-parse", "--short", "HEAD")
    return f"{commit}-dirty" if commit and _git("status", "--porcelain") else commit


def _git(*words: str) -> str | None:
    if shutil.which("git") is None:
        return None
    command = ["git", "-C", str(Path(__file__).parent), *words]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() or None
