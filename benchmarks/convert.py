"""``python -m benchmarks convert``: speed and memory of converting a synthetic checkpoint.

The time is compared with that of a plain copy, a lower bound. The conversion runs as a separate
process, as does a command that only opens the checkpoint: the difference of their peaks is the
memory of the conversion without imports.
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rich.console import Console

from moe_optim.checkpoint.files.publishing import require_writable
from moe_optim.errors import ConfigError, StateError
from moe_optim.experts.keys.layouts import LAYOUTS
from moe_optim.screen import results_console
from moe_optim.spelling import spell_bytes

if TYPE_CHECKING:
    import torch

    from moe_optim.commands.conversion.torch_dist_writer import TorchDistWriter

LAYERS, EXPERTS = 16, 32
_STATES = ("param", "exp_avg", "exp_avg_sq")
_PARAMETER_BYTES = 2 + 4 * len(_STATES)  # bf16 weights, fp32 states


@dataclass(frozen=True)
class Shapes:
    """Experts of a synthetic checkpoint; their width is half the model's."""

    hidden: int

    @classmethod
    def of(cls, nbytes: float) -> "Shapes":
        """Return the shapes of a checkpoint of about ``nbytes``."""
        square = nbytes / (LAYERS * EXPERTS * 3 / 2 * _PARAMETER_BYTES)
        return cls(max(round(sqrt(square) / 32), 1) * 32)

    @property
    def ffn(self) -> int:
        """Width of one expert."""
        return self.hidden // 2

    @property
    def layer_parameters(self) -> int:
        """Parameters of all experts of a layer."""
        return EXPERTS * 3 * self.hidden * self.ffn


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``benchmarks convert``."""
    parser = subparsers.add_parser(
        "convert",
        help="speed and memory of converting a checkpoint",
        description="Create a torch_dist checkpoint of experts, masters and moments, convert it "
        "to safetensors in a separate process, and verify the result. Temporarily needs twice the "
        "size on disk.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--gigabytes", type=float, default=10, metavar="N", help="size; default: 10")
    add("--dir", type=Path, default=Path(), metavar="DIR", help="folder for it; default: here")
    add("--to", choices=LAYOUTS, default="hf", metavar="LAYOUT", help="expert layout; default: hf")
    add("--json", type=Path, metavar="FILE", help="also write the figures to FILE")


def run(args: argparse.Namespace) -> int:
    """Create a checkpoint, convert and verify it, and print the results.

    Raises:
        ConfigError: size is not positive, or the folder not writable.
        StateError: a command failed, or the result is not equal.
    """
    from benchmarks.provenance import begin_report

    if not 0 < args.gigabytes < float("inf"):
        raise ConfigError(f"--gigabytes: expected a size above 0, got {args.gigabytes:g}.")
    if not args.dir.is_dir():
        raise ConfigError(f"--dir {args.dir}: expected a folder, got none. Name another.")
    require_writable(args.json)
    shapes = Shapes.of(args.gigabytes * 1e9)
    console = Console(stderr=True, markup=False, highlight=False)
    with TemporaryDirectory(prefix="bench-convert-", dir=args.dir) as folder:
        source, target = Path(folder) / "source", Path(folder) / "target"
        console.print(f"making a checkpoint of about {args.gigabytes:g} GB in {folder}")
        nbytes = make_checkpoint(source, shapes)
        console.print("copying it")
        copy_s = time_copy(source, Path(folder) / "copy")
        opened = _run("inspect", str(source), "--json")
        console.print("converting")
        options = ["--experts", args.to, "--format", "safetensors"]
        converted = _run("convert", str(source), str(target), *options)
        console.print("verifying")
        verified = _run("verify", str(source), str(target), "--num-experts", str(EXPERTS))
    report = {
        **begin_report(_command(args), on_gpu=False),
        "bytes": nbytes,
        "layers": LAYERS,
        "experts": EXPERTS,
        "hidden": shapes.hidden,
        "ffn": shapes.ffn,
        "to": args.to,
        "layer_bytes": shapes.layer_parameters * _PARAMETER_BYTES,
        "layer_state_bytes": shapes.layer_parameters * 4,
        "copy_s": round(copy_s, 2),
        "convert_s": round(converted.seconds, 2),
        "convert_mb_per_s": round(nbytes / converted.seconds / 1e6, 1),
        "peak_bytes": converted.peak_bytes,
        "peak_bytes_beyond_opening": converted.peak_bytes - opened.peak_bytes,
        "verify_s": round(verified.seconds, 2),
        "equal": True,  # verify exits with 1 otherwise
    }
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    console = results_console()
    for line in _lines(report):
        console.print(line)
    return 0


@dataclass(frozen=True)
class Finished:
    """Result of a successful command."""

    seconds: float
    peak_bytes: int


def _run(*words: str) -> Finished:
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "moe_optim.commands.cli.main", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None, "it is a pipe"
    said = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise StateError(
            f"moe-optim {shlex.join(words)}: expected it to succeed, got exit code "
            f"{process.returncode}: {said.strip() or 'no message'}"
        )
    return Finished(time.perf_counter() - began, usage.ru_maxrss * 1024)


def time_copy(source: Path, target: Path) -> float:
    """Return the seconds for a copy including fsync; the copy is removed."""
    from moe_optim.checkpoint.files.publishing import synchronize

    began = time.perf_counter()
    target.mkdir()
    for path in source.iterdir():
        shutil.copyfile(path, target / path.name)
    synchronize(target)
    seconds = time.perf_counter() - began
    shutil.rmtree(target)
    return seconds


def make_checkpoint(folder: Path, shapes: Shapes) -> int:
    """Write a torch_dist checkpoint of random bits, in Megatron's format for homogeneous layers.

    Creates ``folder``; returns the size of the tensors in bytes.
    """
    import io

    import torch

    from moe_optim.checkpoint.files.torch_dist import COMMON_STATE
    from moe_optim.commands.conversion.torch_dist_writer import TorchDistWriter

    folder.mkdir()
    common = io.BytesIO()
    torch.save([{"iteration": 0}], common)
    kinds = {"": torch.bfloat16} | {f"optimizer.state.{s}.": torch.float32 for s in _STATES}
    with TorchDistWriter(folder) as writer:
        writer.write_object(f"{COMMON_STATE}/shard_0_1", common.getvalue())
        for prefix, dtype in kinds.items():
            _write_experts(writer, prefix, dtype, shapes)
        writer.finish()
    return LAYERS * shapes.layer_parameters * _PARAMETER_BYTES


def _write_experts(
    writer: "TorchDistWriter", prefix: str, dtype: "torch.dtype", shapes: Shapes
) -> None:
    """Write fc1 (gate and up rows as separate entries) and fc2 of all layers."""
    import torch

    from moe_optim.checkpoint.files.reader import TensorInfo

    linears = {
        "linear_fc1": (2, shapes.ffn, shapes.hidden),
        "linear_fc2": (1, shapes.hidden, shapes.ffn),
    }
    for name, (halves, rows, cols) in linears.items():
        key = f"{prefix}decoder.layers.mlp.experts.experts.{name}.weight"
        whole = TensorInfo((LAYERS, EXPERTS, halves * rows, cols), dtype)
        chunk = torch.empty(
            (1, EXPERTS, rows, cols * dtype.itemsize // 4), dtype=torch.int32, device="cpu"
        )
        for layer in range(LAYERS):
            for half in range(halves):
                chunk.random_()
                writer.write_chunk(key, whole, (layer, 0, half * rows, 0), chunk.view(dtype))


def _command(args: argparse.Namespace) -> str:
    words = [
        "python",
        "-m",
        "benchmarks",
        "convert",
        "--gigabytes",
        f"{args.gigabytes:g}",
        "--to",
        args.to,
    ]
    words += ["--dir", str(args.dir)] if args.dir != Path() else []
    words += ["--json", str(args.json)] if args.json else []
    return shlex.join(words)


def _lines(report: dict[str, Any]) -> list[str]:
    return [
        f"{report['device']}: {spell_bytes(report['bytes'])}, {report['layers']} layers of "
        f"{report['experts']} experts, torch_dist to {report['to']} in safetensors",
        f"{report['convert_s']} s, {report['convert_mb_per_s']:,} MB/s, where a plain copy takes "
        f"{report['copy_s']} s; verified in {report['verify_s']} s: equal",
        f"peak memory beyond opening {spell_bytes(report['peak_bytes_beyond_opening'])}; the "
        f"experts of a layer with their states are {spell_bytes(report['layer_bytes'])}, one state "
        f"of them {spell_bytes(report['layer_state_bytes'])}",
    ]
