"""Printing results: folded to the width of a terminal, but in whole lines where a pipe reads."""

import contextlib
import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

FAILED = 1
"""Exit code of a command that did not do what it was asked for, though that could be done."""
_WIDER_THAN_ANY_LINE = 1 << 16  # columns


class Screen(Console):
    """A console whose command goes on to its end after its reader has gone."""

    lost_reader = False
    """Whether the reader of some screen of this process has gone."""

    def on_broken_pipe(self) -> None:
        """Print nothing more, where rich would end the process."""
        self.quiet = Screen.lost_reader = True
        discard_output()


def discard_output() -> None:
    """Discard further output to stdout, once its reader has gone."""
    with contextlib.suppress(OSError, ValueError):  # stdout is no file of this process
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def fail(message: str) -> int:
    """Print an error, and return the exit code of a command that failed."""
    print(f"error: {message}", file=sys.stderr)
    return FAILED


def results_console() -> Console:
    """Return a console of stdout; only a terminal gets its lines folded."""
    console = Screen(markup=False, highlight=False, emoji=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = _WIDER_THAN_ANY_LINE
    return console


def print_table(console: Console, table: Table) -> None:
    """Print a table without cutting a number; only terminals get blanks at line ends.

    A terminal that is narrower than a table whose columns do not wrap folds the lines.
    """
    least = _least_width(table)
    if console.is_terminal and console.width >= least:
        console.print(table)
        return
    text = io.StringIO()
    _plain_console(text, max(console.width, least)).print(table)
    for line in text.getvalue().splitlines():
        console.out(line.rstrip(), highlight=False)


def _least_width(table: Table) -> int:
    """Return the width below which cells are cut; 0 where some cells wrap."""
    if not all(column.no_wrap for column in table.columns):
        return 0
    return _plain_console(io.StringIO(), _WIDER_THAN_ANY_LINE).measure(table).maximum


def _plain_console(file: io.StringIO, width: int) -> Console:
    return Console(
        file=file, width=width, color_system=None, markup=False, highlight=False, emoji=False
    )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings of Megatron and torch about optional packages."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(logging.NOTSET)
