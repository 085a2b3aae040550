"""Trains one MoE GPT with Megatron's optimizer and with ours, in every format, and records losses.

    python -m tools.upstream.convergence --out DIR --json FILE [--iterations N] [--seeds SEED ...]
        [--at-once N] [--cpu] [SIDES ...]

Each side is one ``moe-optim train`` on the text of Python's standard library; with GPUs, runs are
distributed over them, ``--at-once`` on each. A moved side stops halfway and resumes with another
number of ranks, on exclusive GPUs. Times are valid only with ``--at-once 1``. Other sides and seeds
with the same number of iterations stay in the record. Exit status: 1 if a run fails.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from threading import Lock
from typing import Any

from benchmarks.provenance import kernels
from moe_optim.commands.console.provenance import commit
from moe_optim.commands.report.comparison import figures_of
from moe_optim.commands.report.reading import read_run
from moe_optim.environment import find_gpus

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"
LARGER = (  # 70 million parameters, 4 x 16 experts; 8,192 tokens an iteration
    *("--num-layers", "4", "--hidden-size", "512", "--ffn-hidden-size", "1024"),
    *("--num-attention-heads", "8", "--num-experts", "16", "--moe-ffn-hidden-size", "512"),
    *("--seq-length", "512", "--max-position-embeddings", "512"),
    *("--micro-batch-size", "8", "--global-batch-size", "16"),
    *("--lr", "6e-4", "--min-lr", "6e-5", "--save-interval", "1000000"),
)
OF_TE = ("--transformer-impl", "transformer_engine")
FP8 = (*OF_TE, "--fp8-format", "e4m3", "--fp8-recipe", "blockwise", "--fp8-param-gather")


@dataclass(frozen=True, kw_only=True)
class Side:
    train: tuple[str, ...] = ()
    megatron: tuple[str, ...] = ()
    """Megatron flags that override the recipe's and :data:`LARGER`."""
    ranks: tuple[int, ...] = (1,)
    """Ranks of each launch; with two launches, the first stops halfway and the second resumes."""


def portable(format: str) -> Side:
    """Return the side of our portable experts in a format, with bf16 GEMMs on any device."""
    return Side(train=("--set", f"moe_optim.format={format}"))


FP8_BLOCKS = Side(train=("--set", "moe_optim.format=fp8_block"), megatron=FP8)
SIDES: Mapping[str, Side] = {
    "stock bf16": Side(train=("--stock",), megatron=OF_TE),
    "stock FP8 blocks": Side(train=("--stock",), megatron=FP8),
    "FP8 blocks": FP8_BLOCKS,
    "FP8 blocks, moved": Side(train=FP8_BLOCKS.train, megatron=FP8, ranks=(1, 2)),
    **{
        f"portable {name}": portable(name)
        for name in (
            *("bf16", "mxfp8", "mxfp8_2d", "nvfp4", "fp8_block"),
            *("mxfp8_rows", "mxfp4", "nvfp4_rows", "int4"),
        )
    },
}
"""Name of a side -> its options."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    iterations: int
    out: Path
    cpu: bool
    at_once: int = 1
    """Number of runs per GPU; above 1, times are not valid."""
    text: tuple[str, ...] = ()
    more: tuple[str, ...] = ()
    """Megatron flags that override all others."""

    def folder(self, side: str, seed: int) -> Path:
        return self.out / f"{side.replace(' ', '-').replace(',', '')}-{seed}"

    def commands(self, name: str, seed: int) -> list[list[str]]:
        """Return the commands that train a side, one per launch."""
        side = SIDES[name]
        n = self.iterations
        flags = ["--train-iters", str(n), "--eval-interval", str(max(1, n // 20)), "--seed"]
        flags += [str(seed), *LARGER, *side.megatron, *self.more]
        folder = ["--out", str(self.folder(name, seed)), *(["--cpu"] if self.cpu else [])]
        text = ["--text", *self.text] if self.text else []
        commands = []
        for launch, ranks in enumerate(side.ranks):
            first, last = launch == 0, launch == len(side.ranks) - 1
            command = ["moe-optim", "train", str(RECIPE), *folder, "--ranks", str(ranks)]
            command += [*side.train, *(text if first else ["--resume"]), "--", *flags]
            commands.append([*command, *([] if last else ["--exit-interval", str(n // 2)])])
        return commands


def train(asked: Asked, name: str, seed: int, gpus: Sequence[int]) -> dict[str, Any] | None:
    """Train one side on the GPUs of these numbers; return its record, None if it failed."""
    folder = asked.folder(name, seed)
    folder.parent.mkdir(parents=True, exist_ok=True)
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} if gpus else {})
    commands = asked.commands(name, seed)
    for launch, command in enumerate(commands):
        argv = [sys.executable, "-m", "moe_optim.commands.cli.main", *command[1:]]
        with (folder.parent / f"{folder.name}.{launch}.log").open("w") as log:
            done = subprocess.run(argv, env=environment, stdout=log, stderr=log, check=False)
        if done.returncode:
            return None
    run = read_run(folder)
    return {
        "side": name,
        "seed": seed,
        "iterations": asked.iterations,
        "at_once": asked.at_once,
        "ranks_on_a_gpu": int(os.environ.get("RANKS_ON_A_GPU", "1")),
        "commit": commit(),
        **kernels(on_gpu="CPU" not in run.model["environment"]["device"]),
        "device": run.model["environment"]["device"],
        "versions": run.model["environment"]["versions"],
        "commands": [shlex.join(neutral(command, asked)) for command in commands],
        "figures": figures_of(name, run),
        "test_loss": run.summary["test_loss"],
        "held_out": [[point.iteration, point.value] for point in run.events.validation],
        "training": [point.value for point in run.events.train],
    }


def neutral(command: Sequence[str], asked: Asked) -> list[str]:
    """Return a command without this machine's paths."""
    paths = {str(RECIPE): "recipes/quickstart.yaml", f"{asked.out}{os.sep}": f"runs{os.sep}"}
    words = []
    for word in command:
        for path, instead in paths.items():
            word = word.replace(path, instead)
        words.append(word)
    return words


def train_all(
    asked: Asked, runs: Sequence[tuple[str, int]], path: Path
) -> list[dict[str, Any] | None]:
    """Train all runs, ``at_once`` per GPU, and record each when it is done.

    Runs that need several GPUs share them.
    """
    gpus = [] if asked.cpu else range(len(find_gpus()))
    free: Queue[int | None] = Queue()
    recording = Lock()
    for _ in range(asked.at_once):
        for gpu in gpus or [None]:
            free.put(gpu)

    def on_a_free_one(run: tuple[str, int]) -> dict[str, Any] | None:
        gpu = free.get()
        try:
            ranks = max(SIDES[run[0]].ranks)
            own = [] if gpu is None else [(gpu + n) % len(gpus) for n in range(ranks)]
            row = train(asked, *run, own)
            if row is not None:
                with recording:
                    record(path, row)
            return row
        finally:
            free.put(gpu)

    with ThreadPoolExecutor(free.qsize()) as pool:
        return list(pool.map(on_a_free_one, runs))


def record(path: Path, new: Mapping[str, Any]) -> None:
    """Add a run to the record, replacing an earlier one of its side and seed."""
    old = json.loads(path.read_text())["rows"] if path.exists() else []

    def key(row: Mapping[str, Any]) -> tuple[str, int, int]:
        return row["side"], row["seed"], row["iterations"]

    merged = {key(row): row for row in [*old, new]}
    order = list(SIDES)
    found = sorted(merged.values(), key=lambda row: (order.index(row["side"]), row["seed"]))
    lines = ",\n".join(json.dumps(row) for row in found)
    path.write_text(f'{{"rows": [\n{lines}\n]}}\n')


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.upstream.convergence")
    parser.add_argument("--out", type=Path, required=True, help="folder of all runs")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--iterations", type=int, default=1000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1234, 4321])
    parser.add_argument("--at-once", type=int, default=1, help="runs beside each other on a GPU")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--text", nargs="+", default=[], help="as of moe-optim train")
    parser.add_argument("--more", type=shlex.split, default=[], help="flags of Megatron, as one")
    parser.add_argument("sides", nargs="*", metavar="SIDES", default=list(SIDES), help="names")
    args = parser.parse_args(argv)
    if unknown := set(args.sides) - set(SIDES):
        parser.error(f"SIDES: expected {', '.join(SIDES)}, got {', '.join(sorted(unknown))}")
    asked = Asked(
        iterations=args.iterations,
        out=args.out.resolve(),
        cpu=args.cpu,
        at_once=args.at_once,
        text=tuple(args.text),
        more=tuple(args.more),
    )
    runs = [(side, seed) for seed in args.seeds for side in args.sides]
    rows = train_all(asked, runs, args.json)
    for (side, seed), row in zip(runs, rows, strict=True):
        said = f"held-out {row['figures']['held_out_loss']:.4f}" if row else "FAILED"
        print(f"{side}, seed {seed}: {said}")
    return int(None in rows)


if __name__ == "__main__":
    sys.exit(main())
