"""Console output: wrapped in terminals, unwrapped in pipes."""

import contextlib
import io
import logging
import os
import shutil
import sys
import textwrap
import warnings
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

FAILED = 1  # exit code of a command that was valid but failed
_WIDER_THAN_ANY_LINE = 1 << 16  # columns


class Screen(Console):
    """A console that lets its command finish after a broken pipe."""

    lost_reader = False  # whether any console of this process has a broken pipe

    def on_broken_pipe(self) -> None:
        """Discard further output, where rich would exit."""
        self.quiet = Screen.lost_reader = True
        discard_output()


def discard_output() -> None:
    """Discard further output to stdout after a broken pipe."""
    with contextlib.suppress(OSError, ValueError):  # stdout has no file descriptor
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def print_error(message: str) -> None:
    """Print an error to stderr."""
    print(wrap_for_stderr(f"error: {message}"), file=sys.stderr)


def wrap_for_stderr(text: str) -> str:
    """Wrap lines between words if stderr is a terminal."""
    if not sys.stderr.isatty():
        return text
    width = shutil.get_terminal_size().columns
    wrapper = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    lines = []
    for line in text.splitlines():
        wrapper.subsequent_indent = line[: len(line) - len(line.lstrip())]
        lines += wrapper.wrap(line) or [""]
    return "\n".join(lines)


def fail(message: str) -> int:
    """Print an error, and return the exit code of a failed command."""
    print_error(message)
    return FAILED


def results_console() -> Console:
    """Return a console for stdout, which wraps lines only in terminals."""
    console = Screen(markup=False, highlight=False, emoji=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = _WIDER_THAN_ANY_LINE
    return console


def print_table(console: Console, table: Table) -> None:
    """Print a table without truncating numbers, and without trailing blanks outside terminals.

    A terminal narrower than a non-wrapping table wraps whole lines.
    """
    least = 0  # width without truncated cells, unless some columns wrap
    if all(column.no_wrap for column in table.columns):
        least = _plain_console(io.StringIO(), _WIDER_THAN_ANY_LINE).measure(table).maximum
    if console.is_terminal and console.width >= least:
        console.print(table)
        return
    text = io.StringIO()
    _plain_console(text, max(console.width, least)).print(table)
    for line in text.getvalue().splitlines():
        console.out(line.rstrip(), highlight=False)


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
