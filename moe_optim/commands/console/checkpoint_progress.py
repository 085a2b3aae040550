"""Opens checkpoints for commands and shows the progress of bytes processed."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from moe_optim.commands.console.checkpoint_paths import find_checkpoint
from moe_optim.commands.console.workers import number_of_workers

if TYPE_CHECKING:
    from moe_optim.checkpoint.files.reader import CheckpointReader
    from moe_optim.commands.conversion.file_plan import FilePlan
    from moe_optim.commands.conversion.layer_view import LayerView


def open_reader(path: Path) -> "CheckpointReader":
    """Open a checkpoint of either format; print its path on stderr if it differs from ``path``."""
    find_checkpoint(path)  # before the import of torch, which takes seconds
    from moe_optim.commands.conversion.opening import open_checkpoint

    reader = open_checkpoint(path)
    say_which_was_taken(path, reader.path)
    return reader


def say_which_was_taken(path: Path, taken: Path) -> None:
    """Print the path of the opened checkpoint on stderr, if it differs from the given one."""
    if taken != path:
        console = Console(stderr=True, markup=False, highlight=False)
        console.print(f"{path}: using its newest checkpoint, {taken.name}", soft_wrap=True)


def open_view(path: Path, renames: Sequence[str] = ()) -> "LayerView":
    """Open a checkpoint under state-dict keys; ConfigError for a rename that is not ``FROM=TO``."""
    reader = open_reader(path)
    from moe_optim.commands.conversion.layer_view import LayerView, parse_renames

    return LayerView(reader, parse_renames(renames))


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on stderr if it is a terminal; yields a function that adds bytes."""
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


def write_plan(what: str, plan: "FilePlan", args: argparse.Namespace) -> None:
    """Execute a plan with the options ``target`` and ``workers``, and show its progress."""
    workers = number_of_workers(args.workers, plan.total_bytes)
    with progress_bar(what, plan.total_bytes) as report:
        plan.write(args.target, report, workers=workers)
