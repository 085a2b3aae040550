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

_WIDER_THAN_ANY_LINE = 1 << 16  # columns


class Screen(Console):
    """A console whose command goes on to its end when nobody reads what it prints."""

    def on_broken_pipe(self) -> None:
        """Print nothing more, where rich would end the process."""
        self.quiet = True
        discard_output()


def discard_output() -> None:
    """Send what is still written to stdout nowhere, once its reader has gone."""
    with contextlib.suppress(OSError, ValueError):  # stdout is no file of this process
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def results_console() -> Console:
    """Return a console of stdout; what is no terminal gets lines as long as they are."""
    console = Screen(markup=False, highlight=False, emoji=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = _WIDER_THAN_ANY_LINE
    return console


def print_table(console: Console, table: Table, *, least_width: int = 0) -> None:
    """Print a table; what is no terminal gets it without blanks at the ends of lines.

    Args:
        console: where to.
        table: what.
        least_width: columns without which its numbers would be cut; a terminal with fewer of them
            folds lines.
    """
    if console.is_terminal and console.width >= least_width:
        console.print(table)
        return
    text = io.StringIO()
    Console(file=text, width=max(console.width, least_width), color_system=None).print(table)
    for line in text.getvalue().splitlines():
        console.out(line.rstrip(), highlight=False)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence what Megatron and torch say of every optional package they miss."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(logging.NOTSET)
