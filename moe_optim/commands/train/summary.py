"""Results of a finished run: ``summary.json`` and the last screen."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from moe_optim.commands.console.files import write_atomically
from moe_optim.commands.console.tables import build_table
from moe_optim.commands.train.events import TRAIN_TAG, Events, Point, read_events
from moe_optim.commands.train.run_folder import RunFolder
from moe_optim.errors import LayoutError
from moe_optim.screen import print_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MODEL_KEYS = ("format", "optimizer", "parameters", "quantized_parameters", "rank0")
STEPS: Mapping[str | None, str] = {
    "fused": "fused: moe_optim's own, one pass over gradients, masters and moments",
    "stock": "stock: Megatron's code, as on a CPU; a GPU with kernels uses the fused step",
}
"""Step of a run, as its description records it -> what the last screen says of it."""
_TEST_LOSS = re.compile(r" validation loss at .* on test set \| lm loss value: (\S+)")


def write_summary(
    folder: RunFolder,
    *,
    world_size: int,
    seconds: float,
    command: str,
    resumed_from: int | None,
    byte_entropy: float | None,
    last_log: Path,
) -> dict[str, Any]:
    """Write ``summary.json`` and return the summary.

    Time and command are those of this launch; ``last_log`` is that of the last rank, which has the
    test loss. The byte entropy, nats per byte of the validation text, is None for Megatron's data.
    """
    try:
        model = json.loads(folder.model.read_text())
        described = {key: model[key] for key in _MODEL_KEYS}
    except (OSError, ValueError, KeyError) as error:
        raise LayoutError(
            f"{folder.model}: expected a description of the model with {', '.join(_MODEL_KEYS)}, "
            f"which rank 0 writes, got {error}."
        ) from error
    curves = read_events(folder.tensorboard)
    if not curves.train:
        raise LayoutError(f"{folder.tensorboard}: expected the scalar {TRAIN_TAG!r}, got none.")
    test = _TEST_LOSS.findall(last_log.read_text(errors="replace"))
    summary = {
        **described,
        "world_size": world_size,
        "iterations": curves.train[-1].iteration,
        "loss_first": curves.train[0].value,
        "loss_last": curves.train[-1].value,
        "validation_losses": [point.value for point in curves.validation],
        "validation_iterations": [point.iteration for point in curves.validation],
        "test_loss": float(test[-1]) if test else None,
        "byte_entropy": byte_entropy,
        "seconds": seconds,
        "iterations_per_second": _iterations_per_second(curves.train, resumed_from or 0),
        "resumed_from": resumed_from,
        "command": command,
    }
    write_atomically(folder.summary, (json.dumps(summary, indent=2) + "\n").encode())
    return summary


def _iterations_per_second(curve: Sequence[Point], start: int) -> float | None:
    """Return the speed after iteration ``start``, including evaluations and saves."""
    launch = [point for point in curve if point.iteration > start]
    if len(launch) < 2 or launch[-1].time <= launch[0].time:
        return None
    return (launch[-1].iteration - launch[0].iteration) / (launch[-1].time - launch[0].time)


def smoothed(losses: Sequence[float]) -> list[float]:
    """Return the centered moving average over about a twentieth of the curve.

    The window shrinks towards both ends.
    """
    reach = len(losses) // 40
    nears = [min(reach, index, len(losses) - 1 - index) for index in range(len(losses))]
    return [fmean(losses[i - near : i + near + 1]) for i, near in enumerate(nears)]


def loss_unit(summary: Mapping[str, Any]) -> str:
    """Return the unit of losses: nats per byte if the summary contains a byte entropy."""
    return "nats/byte" if summary.get("byte_entropy") is not None else "nats/token"


def draw_curves(axes: "Axes", curves: Events) -> None:
    """Draw training loss, raw and smoothed, and held-out loss."""
    iterations = [point.iteration for point in curves.train]
    losses = [point.value for point in curves.train]
    axes.plot(iterations, losses, color="tab:blue", alpha=0.25, linewidth=0.8)
    axes.plot(iterations, smoothed(losses), color="tab:blue", linewidth=1.8, label="training")
    if held_out := curves.validation:
        iterations, losses = [p.iteration for p in held_out], [p.value for p in held_out]
        label = f"held-out, {losses[-1]:.2f} at the end"
        axes.plot(iterations, losses, "o-", color="tab:orange", ms=5, linewidth=1, label=label)


def print_summary(
    summary: Mapping[str, Any], folder: RunFolder, longer: str, console: Console
) -> None:
    """Print losses, speed, paths of the results, and the command ``longer``."""
    total, quantized = summary["parameters"], summary["quantized_parameters"]
    share = quantized / max(total, 1)
    held_out, test = summary["validation_losses"], summary["test_loss"]
    entropy, speed = summary["byte_entropy"], summary["iterations_per_second"]
    trained = summary["iterations"] - (summary["resumed_from"] or 0)
    rows = {
        "expert weights": f"{summary['format']}, {summary['optimizer']}",
        "optimizer step": STEPS.get(summary["rank0"].get("step")),
        "parameters": f"{total:,}, {quantized:,} of them quantized ({share:.0%})",
        "training loss": f"{summary['loss_first']:.4f} -> {summary['loss_last']:.4f}",
        "held-out loss": held_out and f"{held_out[0]:.4f} -> {held_out[-1]:.4f}",
        "test loss": test is not None and f"{test:.4f}",
        "byte entropy": entropy is not None
        and f"{entropy:z.4f} nats/byte, of byte frequencies alone",
        "speed": f"{speed:.2f} iterations/s" if speed else "not measured",
        "time": f"{summary['seconds']:.0f} s for {trained:,} iterations",
        "summary": folder.summary,
        "checkpoints": folder.checkpoints,
        "TensorBoard": shlex.join(["tensorboard", "--logdir", str(folder.tensorboard)]),
        "train longer": longer,
    }
    cells = [(Text(name, "bold"), str(value)) for name, value in rows.items() if value]
    table = build_table(("Training finished", ""), cells, fold=("",), gap=2)
    print_table(console, table)
