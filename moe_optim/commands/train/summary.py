"""What a finished run leaves behind: its curves read back, ``summary.json`` and ``loss.png``."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from moe_optim.commands.console.files import write_atomically
from moe_optim.commands.console.pictures import png_of
from moe_optim.commands.train.events import TRAIN_TAG, VALIDATION_TAG, Point, read_events
from moe_optim.commands.train.run_folder import RunFolder
from moe_optim.errors import LayoutError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MODEL_KEYS = ("optimizer", "format", "parameters", "quantized_parameters", "rank0")


@dataclass(frozen=True, kw_only=True)
class Curves:
    """The losses of a run, one point an iteration, by iteration."""

    train: tuple[Point, ...]
    validation: tuple[Point, ...]


@dataclass(frozen=True, kw_only=True)
class LaunchFacts:
    """What only the launcher knows of a run."""

    world_size: int
    seconds: float
    """Wall-clock time of this launch, imports included."""
    command: str
    resumed_from: int | None
    byte_entropy: float | None
    """Nats a byte of the validation text; None for data that is not ours."""
    test_loss: float | None


def read_curves(folder: Path) -> Curves:
    """Read the losses of all launches, see :func:`read_events`."""
    scalars = read_events(folder).scalars
    return Curves(train=scalars.get(TRAIN_TAG, ()), validation=scalars.get(VALIDATION_TAG, ()))


def iterations_per_second(curve: Sequence[Point], resumed_from: int | None) -> float | None:
    """Return the speed of the last launch, evaluations and saves included, start-up left out."""
    launch = [point for point in curve if point.iteration > (resumed_from or 0)]
    if len(launch) < 2 or launch[-1].time <= launch[0].time:
        return None
    return (launch[-1].iteration - launch[0].iteration) / (launch[-1].time - launch[0].time)


def build_summary(model: Mapping[str, Any], curves: Curves, facts: LaunchFacts) -> dict[str, Any]:
    """Return the content of ``summary.json``: losses in nats a token, times in seconds.

    Raises:
        LayoutError: the run left no training loss, or ``model`` lacks a key.
    """
    if not curves.train:
        raise LayoutError(f"tensorboard events: expected the scalar {TRAIN_TAG!r}, got none.")
    missing = [key for key in _MODEL_KEYS if key not in model]
    if missing:
        raise LayoutError(f"model.json: expected the keys {_MODEL_KEYS}, got none of {missing}.")
    return {
        "format": model["format"],
        "optimizer": model["optimizer"],
        "world_size": facts.world_size,
        "parameters": model["parameters"],
        "quantized_parameters": model["quantized_parameters"],
        "rank0": model["rank0"],
        "iterations": curves.train[-1].iteration,
        "loss_first": curves.train[0].value,
        "loss_last": curves.train[-1].value,
        "validation_losses": [point.value for point in curves.validation],
        "validation_iterations": [point.iteration for point in curves.validation],
        "test_loss": facts.test_loss,
        "byte_entropy": facts.byte_entropy,
        "seconds": facts.seconds,
        "iterations_per_second": iterations_per_second(curves.train, facts.resumed_from),
        "resumed_from": facts.resumed_from,
        "command": facts.command,
    }


def write_summary(folder: RunFolder, facts: LaunchFacts) -> dict[str, Any]:
    """Write ``loss.png``, then ``summary.json``, each whole or not at all; return the summary.

    Raises:
        LayoutError: the run did not leave what a summary is made of.
        OSError: the disk is full.
    """
    try:
        model = json.loads(folder.model.read_text())
    except (OSError, ValueError) as error:
        raise LayoutError(f"{folder.model}: expected rank 0's account of the model.") from error
    curves = read_curves(folder.tensorboard)
    summary = build_summary(model, curves, facts)
    write_atomically(folder.loss_plot, plot_losses(curves, summary))
    write_atomically(folder.summary, (json.dumps(summary, indent=2) + "\n").encode())
    return summary


def smoothed(losses: Sequence[float]) -> list[float]:
    """Return the mean of each loss and its neighbours, about a twentieth of the curve in all.

    The window is centred and shrinks towards both ends, so the result lags behind nothing.
    """
    reach = len(losses) // 40
    result = []
    for index in range(len(losses)):
        near = min(reach, index, len(losses) - 1 - index)
        window = losses[index - near : index + near + 1]
        result.append(sum(window) / len(window))
    return result


def loss_unit(summary: Mapping[str, Any]) -> str:
    """Return what losses are counted in: tokens are bytes where a summary has their entropy."""
    return "nats/byte" if summary.get("byte_entropy") is not None else "nats/token"


def plot_losses(curves: Curves, summary: Mapping[str, Any]) -> bytes:
    """Draw training and held-out loss against the byte entropy; return a PNG."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    draw_curves(axes, curves)
    entropy = summary["byte_entropy"]
    if entropy is not None:
        label = f"byte entropy of the held-out text: {entropy:z.2f}"
        axes.axhline(entropy, color="0.45", linestyle="--", linewidth=1, label=label)
    axes.set(xlabel="iteration", ylabel=f"loss ({loss_unit(summary)})", xlim=(0, None))
    axes.set_title(f"{summary['format']} expert weights, {summary['optimizer']}", loc="left")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", color="0.92")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return png_of(figure)


def draw_curves(axes: "Axes", curves: Curves) -> None:
    """Draw training loss, as it is and smoothed, and held-out loss."""
    iterations = [point.iteration for point in curves.train]
    losses = [point.value for point in curves.train]
    axes.plot(iterations, losses, color="tab:blue", alpha=0.25, linewidth=0.8)
    axes.plot(iterations, smoothed(losses), color="tab:blue", linewidth=1.8, label="training")
    held_out = curves.validation
    axes.plot(
        [point.iteration for point in held_out],
        [point.value for point in held_out],
        color="tab:orange",
        marker="o",
        markersize=5,
        linewidth=1,
        label=f"held-out, {held_out[-1].value:.2f} at the end" if held_out else None,
    )


def print_summary(
    summary: Mapping[str, Any], folder: RunFolder, longer: str, console: Console
) -> None:
    """Print losses, speed, where everything lies, and ``longer``, the command that trains on."""
    table = Table(title="Training finished", title_justify="left", show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _rows(summary, folder, longer):
        table.add_row(name, value)
    console.print(table, highlight=False)


def _rows(summary: Mapping[str, Any], folder: RunFolder, longer: str) -> list[tuple[str, str]]:
    speed = summary["iterations_per_second"]
    rows = [
        ("expert weights", f"{summary['format']}, {summary['optimizer']}"),
        ("parameters", _parameters(summary)),
        ("training loss", f"{summary['loss_first']:.4f} -> {summary['loss_last']:.4f}"),
    ]
    if summary["validation_losses"]:
        rows.append(("held-out loss", " -> ".join(_ends(summary["validation_losses"]))))
    if summary["test_loss"] is not None:
        rows.append(("test loss", f"{summary['test_loss']:.4f}"))
    if summary["byte_entropy"] is not None:
        rows.append(("byte entropy", f"{summary['byte_entropy']:z.4f} (nats/byte, held-out text)"))
    rows += [
        ("speed", f"{speed:.2f} iterations/s" if speed else "not measured"),
        ("time", _time(summary)),
        ("summary", str(folder.summary)),
        ("loss curve", str(folder.loss_plot)),
        ("checkpoints", str(folder.checkpoints)),
        ("TensorBoard", shlex.join(["tensorboard", "--logdir", str(folder.tensorboard)])),
        ("train longer", longer),
    ]
    return rows


def _time(summary: Mapping[str, Any]) -> str:
    """Say how long the last launch took, and for what."""
    resumed_from = summary["resumed_from"]
    trained = summary["iterations"] - (resumed_from or 0)
    said = f"{summary['seconds']:.0f} s for {trained:,} iteration{'s' * (trained != 1)}"
    return said if resumed_from is None else f"{said}, from {resumed_from:,} on"


def _parameters(summary: Mapping[str, Any]) -> str:
    total, quantized = summary["parameters"], summary["quantized_parameters"]
    return f"{total:,}, of them {quantized:,} quantized ({quantized / max(total, 1):.0%})"


def _ends(losses: Sequence[float]) -> list[str]:
    ends = losses if len(losses) < 2 else (losses[0], losses[-1])
    return [f"{loss:.4f}" for loss in ends]
