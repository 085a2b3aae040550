"""Printing results: folded to the width of a terminal, but in whole lines where a pipe reads."""

import contextlib
import logging
import warnings
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

_WIDER_THAN_ANY_LINE = 1 << 16  # columns


def results_console() -> Console:
    """Return a console of stdout; what is no terminal gets lines as long as they are."""
    console = Console(markup=False, highlight=False, emoji=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = _WIDER_THAN_ANY_LINE
    return console


def print_table(console: Console, table: Table) -> None:
    """Print a table; what is no terminal gets it without blanks at the ends of lines."""
    if console.is_terminal:
        console.print(table)
        return
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
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
