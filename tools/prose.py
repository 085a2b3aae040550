"""Checks that argument lines of docstrings begin with a noun.

    python -m tools.prose [--budget N] [PATH ...]

Prints ``file:line: parameter: text`` for each line under ``Args:`` that begins with another word,
and exits with 1 if there are more than the budget allows.
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FOLDERS = (ROOT / "moe_optim", ROOT / "benchmarks")

_WORDS = """
about after as at before behind below beside besides between but by for from given had has have how
if in into is it its likewise nobody not of on only other otherwise see so such taken than that
their them then there these they this those to under until what whatever when where wherever which
who whoever whom whose why with without you your
"""
NO_NOUNS = frozenset(_WORDS.split())
"""First words, in lower case, that begin no noun phrase."""

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

_SECTION = re.compile(r"^(\s*)(\w+):\s*$")
_ENTRY = re.compile(r"^(\s+)(\*{0,2}\w+)(?: \([^)]*\))?: (.*)$")


class ArgumentLine(NamedTuple):
    """One line under ``Args:``."""

    path: Path
    line: int
    """Line number in the file, from 1."""
    parameter: str
    text: str

    @property
    def names_a_thing(self) -> bool:
        """Whether the first word may begin a noun phrase."""
        words = re.findall(r"[\w'-]+", self.text)
        return not words or words[0].lower() not in NO_NOUNS

    def __str__(self) -> str:
        place = self.path.relative_to(ROOT) if self.path.is_relative_to(ROOT) else self.path
        return f"{place}:{self.line}: {self.parameter}: {self.text}"


def argument_lines(path: Path) -> Iterator[ArgumentLine]:
    """Yield the argument lines of all docstrings of a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, Documented) and ast.get_docstring(node, clean=False):
            statement = node.body[0]
            assert isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            yield from _of_docstring(path, statement.lineno, str(statement.value.value))


def _of_docstring(path: Path, first_line: int, docstring: str) -> Iterator[ArgumentLine]:
    inside, indent = False, 0
    for line, text in enumerate(docstring.splitlines(), start=first_line):
        if section := _SECTION.match(text):
            inside, indent = section[2] == "Args", len(section[1])
        elif inside and (entry := _ENTRY.match(text)) and len(entry[1]) == indent + 4:
            yield ArgumentLine(path, line, entry[2], entry[3])


def find_faults(paths: Sequence[Path] = FOLDERS) -> list[ArgumentLine]:
    """Return the argument lines of files and folders that do not begin with a noun."""
    files = [file for path in paths for file in (sorted(path.rglob("*.py")) or [path])]
    return [one for file in files for one in argument_lines(file) if not one.names_a_thing]


def main(argv: Sequence[str] | None = None) -> int:
    """Run from a command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.prose", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("paths", nargs="*", type=Path, default=FOLDERS)
    parser.add_argument("--budget", type=int, default=0, help="lines that may be at fault")
    args = parser.parse_args(argv)
    faults = find_faults(args.paths)
    if len(faults) <= args.budget:
        return 0
    print(*faults, sep="\n")
    print(
        f"{len(faults)} argument lines name no thing, at most {args.budget} may: "
        "begin each with a noun, as in 'grad: reduced gradient, fp32 [numel]'",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
