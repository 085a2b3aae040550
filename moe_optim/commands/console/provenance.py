"""Code version and machine of a run or plan."""

import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

from moe_optim.environment import find_gpus, find_versions


def describe_environment(*, on_gpu: bool, ranks: int = 1) -> dict[str, Any]:
    """Return ``commit``, ``device`` and ``versions``; ``ranks`` is the number of GPUs used."""
    device = describe_cpu()
    if on_gpu:
        used = [gpu.name for gpu in find_gpus()][:ranks]
        counts = {name: used.count(name) for name in used}
        device = ", ".join(f"{n} x {name}" if n > 1 else name for name, n in counts.items())
    return {"commit": commit(), "device": device, "versions": find_versions()}


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
