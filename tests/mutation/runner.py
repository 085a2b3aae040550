"""Runs tests over a copy of a checkout with one mutant in it."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.mutation import Mutant

COPIED = ("moe_optim", "tests")
"""Of a checkout; all else that tests read is linked to."""
TIMEOUT_S = 600
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant.

    Args:
        word: ``killed``, ``survived`` or ``stale``.
        by: names of the tests that failed, or why it is stale.
    """

    word: str
    by: str = ""

    @property
    def is_killed(self) -> bool:
        """Whether some test failed."""
        return self.word == "killed"


def judge(root: Path, mutant: Mutant) -> Verdict:
    """Run the tests of a mutant over a copy of ``root`` that has it."""
    count = (root / "moe_optim" / mutant.file).read_text().count(mutant.old)
    if count != 1:
        return Verdict("stale", f"expected its code once, found it {count} times")
    if failed := run_tests(root, mutant.killers, mutant):
        return Verdict("killed", ", ".join(failed))
    return Verdict("survived", f"passed: {', '.join(mutant.killers)}")


def run_tests(root: Path, tests: Sequence[str], mutant: Mutant | None = None) -> list[str]:
    """Return which tests fail over a copy of ``root``, with a mutant in it if there is one.

    Raises:
        RuntimeError: pytest could not run them.
    """
    with _copied(root) as copy:
        if mutant is not None:
            file = copy / "moe_optim" / mutant.file
            file.write_text(file.read_text().replace(mutant.old, mutant.new))
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
        try:
            done = subprocess.run(
                [*command, *(["-x"] if mutant else []), *tests],
                cwd=copy,
                env=os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"},
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            return [f"no end within {TIMEOUT_S} s"]
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{mutant or 'no mutant'}: {done.stdout[-3000:]}{done.stderr[-3000:]}")
    return _FAILED.findall(done.stdout)


@contextmanager
def _copied(root: Path) -> Iterator[Path]:
    with TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder)
        for path in root.iterdir():
            if path.name in COPIED:
                shutil.copytree(
                    path, copy / path.name, ignore=shutil.ignore_patterns("__pycache__")
                )
            elif not path.name.startswith(".git"):
                (copy / path.name).symlink_to(path)
        yield copy
