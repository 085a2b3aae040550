"""Reading Megatron's log while it is written, and showing on a terminal how far training is."""

import math
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

_ITERATION = re.compile(r" iteration\s+(\d+)/\s*(\d+) \|")
_MILLISECONDS = re.compile(r"elapsed time per iteration \(ms\): ([\d.]+)")
_LOSS = re.compile(r" lm loss: (\S+) \|")
_EVALUATION = re.compile(
    r" validation loss at iteration (\d+)( on \w+ set)? \| lm loss value: (\S+)"
)
_SAVED = re.compile(r"successfully saved checkpoint from iteration\s+(\d+)")
_STAGES = {  # what Megatron prints when it has come so far -> what it does next
    "> initialized tensor model parallel": "building the model",
    "loading distributed checkpoint from": "loading the checkpoint",
    "> building train, validation, and test datasets": "indexing the dataset",
    "done with setup": "first iteration",
}
_PLAIN_SECONDS = 10.0


@dataclass
class TrainingState:
    """What the log of a run has said so far."""

    stage: str = "importing Megatron"
    iteration: int = 0
    total: int = 0
    loss: float | None = None
    seconds_per_iteration: float | None = None
    """Mean over the last iterations, evaluations and saves left out."""
    held_out: dict[int, float] = field(default_factory=dict)
    """Loss on validation text by iteration; the first evaluation of an iteration counts."""
    test_loss: float | None = None
    saved: int | None = None
    """Iteration of the newest checkpoint that this launch finished."""
    _readings: int = 0

    def read(self, line: str) -> None:
        """Take over what one log line says."""
        if found := _ITERATION.search(line):
            self._read_iteration(line, int(found[1]), int(found[2]))
        elif found := _EVALUATION.search(line):
            self._read_evaluation(int(found[1]), found[2] or "", float(found[3]))
        elif found := _SAVED.search(line):
            self.saved = int(found[1])
        else:
            self.stage = next((_STAGES[key] for key in _STAGES if key in line), self.stage)

    def _read_iteration(self, line: str, iteration: int, total: int) -> None:
        self.stage, self.iteration, self.total = "training", iteration, total
        loss, milliseconds = _LOSS.search(line), _MILLISECONDS.search(line)
        self.loss = float(loss[1]) if loss else math.nan  # Megatron leaves a NaN out
        if milliseconds:
            self._average(float(milliseconds[1]) / 1e3)

    def _average(self, seconds: float) -> None:
        """Take the mean of up to 20 readings; the first, with all that starts up, is dropped."""
        self._readings += 1
        weight = 1 / min(max(self._readings - 1, 1), 20)
        before = self.seconds_per_iteration or 0.0
        self.seconds_per_iteration = before + weight * (seconds - before)

    def _read_evaluation(self, iteration: int, where: str, loss: float) -> None:
        if "test" in where:
            self.test_loss = loss
        else:
            self.held_out.setdefault(iteration, loss)

    @property
    def seconds_left(self) -> float | None:
        """Estimate of the remaining training time; evaluations and saves come on top."""
        if self.seconds_per_iteration is None:
            return None
        return self.seconds_per_iteration * (self.total - self.iteration)

    def status(self) -> str:
        """Say losses, speed and time left in one short line."""
        parts = []
        if self.loss is not None:
            parts.append(f"loss {self.loss:.3f}")
        if self.held_out:
            parts.append(f"held-out {list(self.held_out.values())[-1]:.3f}")
        if self.seconds_per_iteration:
            parts.append(f"{1 / self.seconds_per_iteration:.1f} it/s")
        if self.seconds_left is not None:
            minutes, seconds = divmod(round(self.seconds_left), 60)
            parts.append(f"{minutes}:{seconds:02d} left")
        return " · ".join(parts)


class LogTail:
    """Whole lines of a growing file, each once; a file that is not there yet has none."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new_lines(self) -> list[str]:
        """Return the lines finished since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            finished, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(finished) + len(newline)
        return finished.decode(errors="replace").splitlines()


class Display:
    """Shows a :class:`TrainingState`: a live bar on a terminal, a line now and then elsewhere.

    Evaluations and checkpoints get a line of their own on both.
    """

    def __init__(self, console: Console, state: TrainingState, what: str) -> None:
        self._console = console
        self._state = state
        self._what = what
        self._started = time.monotonic()
        self._last_plain = -math.inf
        self._told: set[str] = set()
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            console=console,
            transient=True,
            expand=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=None, status="")

    def __enter__(self) -> Self:
        """Start the live bar."""
        self.update()  # first: the bar paints itself when it starts
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Take the live bar away."""
        self._bar.stop()

    def update(self) -> None:
        """Show the state as it is now."""
        self._tell_events()
        if not self._console.is_terminal:
            self._update_plain()
        elif self._state.total:
            self._bar.update(
                self._task,
                description="training",
                total=self._state.total,
                completed=self._state.iteration,
                status=self._state.status(),
            )
        else:
            elapsed = time.monotonic() - self._started
            status = f"{self._what}: {self._state.stage} · {elapsed:.0f} s"
            self._bar.update(self._task, status=status)

    def _tell_events(self) -> None:
        for iteration, loss in self._state.held_out.items():
            self._tell(f"iteration {iteration}: held-out loss {loss:.4f}")
        if self._state.test_loss is not None:
            self._tell(f"test loss {self._state.test_loss:.4f}")
        if self._state.saved is not None:
            self._tell(f"iteration {self._state.saved}: checkpoint saved")

    def _tell(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            self._console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)

    def _update_plain(self) -> None:
        state = self._state
        if not state.total:
            self._tell(f"starting {self._what}: {state.stage}")
        elif time.monotonic() - self._last_plain >= _PLAIN_SECONDS:
            self._last_plain = time.monotonic()
            self._tell(f"iteration {state.iteration}/{state.total} · {state.status()}")
