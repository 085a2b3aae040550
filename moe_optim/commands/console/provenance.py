"""Which code measured or planned something, and where."""

import hashlib
import os
import platform
import shutil
import subprocess
import tokenize
from collections.abc import Iterator, Mapping
from io import StringIO
from pathlib import Path
from typing import Any

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
    return {"kernels": hash_code(kernel_sources())} if on_gpu else {}


def kernel_sources() -> dict[str, str]:
    """Return the source of every file of ``moe_optim/kernels``, by its place there."""
    folder = Path(__file__).parents[2] / "kernels"
    paths = sorted(folder.rglob("*.py"))
    return {path.relative_to(folder).as_posix(): path.read_text("utf-8") for path in paths}


def hash_code(sources: Mapping[str, str]) -> str:
    """Return 12 digits that change with code.

    Comments, docstrings, line breaks and imports do not count, so that files may move.

    Args:
        sources: file -> Python.
    """
    digest = hashlib.sha256()
    for name, source in sorted(sources.items()):
        digest.update("\0".join([name, *_code_of(source), ""]).encode())
    return digest.hexdigest()[:12]


def _code_of(source: str) -> Iterator[str]:
    """Yield the words of a program, and where its lines and blocks begin and end."""
    blocks = (tokenize.INDENT, tokenize.DEDENT)
    line: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.NL):
            continue
        line.append(token)
        if token.type in (tokenize.NEWLINE, tokenize.ENDMARKER):
            statement = [one.type for one in line if one.type not in blocks]
            is_text = statement == [tokenize.STRING, tokenize.NEWLINE]  # a docstring
            words = [one.string for one in line if one.type not in blocks]
            counts = not is_text and words[0] not in ("import", "from")
            for one in line:
                if counts or one.type in blocks:
                    yield one.string.strip() or tokenize.tok_name[one.type]
            line = []


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
