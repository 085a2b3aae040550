"""Which code measured or planned something."""

import shutil
import subprocess
from pathlib import Path


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
