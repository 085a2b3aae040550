"""Opening a checkpoint for a command, and the bar that shows bytes done."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

if TYPE_CHECKING:
    from moe_optim.checkpoint.files.reader import CheckpointReader
    from moe_optim.commands.conversion.layer_view import LayerView


def open_reader(path: Path) -> "CheckpointReader":
    """Open a checkpoint of either format; print on stderr if another path was taken.

    Raises:
        StateError: nothing is there, or it is damaged.
        LayoutError: it is no checkpoint.
    """
    from moe_optim.commands.conversion.opening import open_checkpoint

    reader = open_checkpoint(path)
    say_which_was_taken(path, reader.path)
    return reader


def say_which_was_taken(path: Path, taken: Path) -> None:
    """Print on stderr which checkpoint was taken, if it is not the given path."""
    if taken != path:
        console = Console(stderr=True, markup=False, highlight=False)
        console.print(f"{path}: taking its newest checkpoint, {taken.name}", soft_wrap=True)


def open_view(path: Path, renames: Sequence[str] = ()) -> "LayerView":
    """Open a checkpoint under the keys of state dicts; raises as :func:`open_reader` does.

    Raises:
        ConfigError: a rename is not ``FROM=TO``, or fits nothing.
    """
    from moe_optim.commands.conversion.layer_view import LayerView, parse_renames

    return LayerView(open_reader(path), parse_renames(renames))


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar on stderr, on a terminal alone; yields a function that adds bytes done."""
    console = Console(stderr=True)
    with Progress(
        *Progress.get_default_columns()[:2],
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.update(task, advance=done)
