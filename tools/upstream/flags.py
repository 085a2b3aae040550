"""Runs Megatron's unmodified ``pretrain_gpt.py`` with flags enabled, and compares pairs of runs.

    python -m tools.upstream.flags --megatron-lm PATH --json FILE [--ranks N] [--at-once N]
        [--cpu] [--pairs WORDS ...]

PATH is a checkout, whose script runs with the installed Megatron. Runs are deterministic, 12
iterations with an evaluation every three; each pair is a run with a flag and a reference that must
print the same digits: stock Megatron, or the plug-in without the flag. On GPUs experts are
Transformer Engine's, in FP8 blocks by default; with ``--cpu`` they are Megatron's own in bf16, and
pairs that need a GPU are skipped. ``--pairs`` selects pairs by words in their names. Exit status: 1
if a run prints too little, or if a pair differs in output or exit status.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.provenance import begin_report
from benchmarks.step import DETERMINISTIC_ENVIRONMENT

SCRIPT = ("pretrain_gpt.py", "gpt_builders.py", "model_provider.py")
MODEL = shlex.split("""
--num-layers 2 --hidden-size 512 --ffn-hidden-size 512 --num-attention-heads 4 --seq-length 256
--max-position-embeddings 256 --position-embedding-type rope --normalization RMSNorm --swiglu
--disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0
--hidden-dropout 0 --num-experts 8 --moe-ffn-hidden-size 512 --moe-router-topk 2
--moe-token-dispatcher-type alltoall --bf16 --seed 1234 --micro-batch-size 2
--global-batch-size 8 --train-iters 12 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine
--use-distributed-optimizer --no-gradient-accumulation-fusion --mock-data
--tokenizer-type NullTokenizer --vocab-size 1000 --num-workers 0 --eval-interval 3 --eval-iters 2
--save-interval 1000 --ckpt-format torch_dist --log-interval 1
""")
ON_GPU = shlex.split(
    "--transformer-impl transformer_engine --moe-grouped-gemm --deterministic-mode"
)
FP8 = shlex.split("--fp8-format e4m3 --fp8-recipe blockwise --fp8-param-gather")
ON_CPU = shlex.split("""
--transformer-impl local --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-persist-layer-norm
--no-rope-fusion --no-create-attention-mask-in-dataloader --distributed-backend gloo
""")
EAGER = {"TORCHDYNAMO_DISABLE": "1", "NVTE_TORCH_COMPILE": "0"}
"""Disables compilation, which would take longer than a whole run."""
ENVIRONMENT = DETERMINISTIC_ENVIRONMENT | EAGER | {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
"""Deterministic algorithms, without compilation."""


@dataclass(frozen=True)
class Side:
    flags: tuple[str, ...]
    """Flags in addition to those of every run."""
    knobs: tuple[str, ...] | None
    """Assignments of ``--moe-optim-set``; None trains with stock Megatron."""
    in_bf16: bool = False
    """Whether weights stay bf16 between steps, on GPUs too."""

    @property
    def name(self) -> str:
        who = "stock" if self.knobs is None else " ".join(("plug-in", *self.knobs))
        return " ".join([who, *(["bf16"] if self.in_bf16 else []), *self.flags])

    def arguments(self, *, cpu: bool) -> list[str]:
        words = [*(ON_CPU if cpu else ON_GPU), *MODEL]
        words += [] if cpu or self.in_bf16 else FP8
        words += self.flags  # last: these override
        if self.knobs is not None:
            words.append("--use-moe-grouped-optim")
            words += [word for knob in self.knobs for word in ("--moe-optim-set", knob)]
        return words


def stock(*flags: str, in_bf16: bool = False) -> Side:
    return Side(flags, None, in_bf16)


def plugin(*flags: str, in_bf16: bool = False, knobs: Sequence[str] = ("layout=stock",)) -> Side:
    """Return a run of the plug-in; with ``layout: stock`` steps are Megatron's."""
    return Side(flags, tuple(knobs), in_bf16)


def fused(*flags: str, in_bf16: bool = False) -> Side:
    return plugin(*flags, in_bf16=in_bf16, knobs=("step=fused",))


OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather")
REUSE = "--reuse-grad-buf-for-mxfp8-param-ag"
AWARE = "--use-precision-aware-optimizer"
MOMENTS = ("--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16")
NARROW = (*OVERLAP, AWARE, *MOMENTS, "--main-grads-dtype", "fp32", "--main-params-dtype", "fp32")
EXPERTS_APART = ("--expert-model-parallel-size", "2")
PADDED = (*OVERLAP, "--moe-expert-capacity-factor", "1.0", "--moe-pad-expert-input-to-capacity")
PADDED += ("--te-rng-tracker", "--no-check-for-nan-in-loss-and-grad")
GRAPHS = ("--cuda-graph-impl", "full_iteration", "--cuda-graph-warmup-steps", "3")
STEP_GRAPH = "--optimizer-cuda-graph"
UNCLIPPED = ("--clip-grad", "0")
OFFLOAD = (AWARE, "--optimizer-cpu-offload")
REGISTERED = (*OVERLAP, "--use-nccl-ub")
TRACKED = (*OVERLAP, "--te-rng-tracker")
BF16_WIRE = ("layout=stock", "wire=bf16")
TENSORWISE = ("--fp8-recipe", "tensorwise")


@dataclass(frozen=True)
class Pair:
    beside: Side
    turned_on: Side
    on_cpu: bool = False
    """Whether a CPU can run both, without graphs and Transformer Engine, and with torch's Adam."""

    @property
    def sides(self) -> tuple[Side, Side]:
        """Both runs, the one with the flag last."""
        return self.beside, self.turned_on


PAIRS: Mapping[str, Pair] = {
    "both overlaps": Pair(stock(*OVERLAP), plugin(*OVERLAP), on_cpu=True),
    f"`{REUSE}`": Pair(stock(*OVERLAP), plugin(*OVERLAP, REUSE)),
    "the same, `wire: bf16`": Pair(stock(*OVERLAP), plugin(*OVERLAP, REUSE, knobs=BF16_WIRE)),
    "bf16 moments (`--use-precision-aware-optimizer`)": Pair(stock(*NARROW), plugin(*NARROW)),
    f"bf16 moments and `{REUSE}`": Pair(stock(*NARROW), plugin(*NARROW, REUSE)),
    "expert parallel 2": Pair(stock(*EXPERTS_APART), plugin(*EXPERTS_APART), on_cpu=True),
    f"expert parallel 2 and `{REUSE}`": Pair(stock(*EXPERTS_APART), plugin(*EXPERTS_APART, REUSE)),
    "experts padded to a capacity": Pair(stock(*PADDED), plugin(*PADDED)),
    "`--cuda-graph-impl full_iteration`, beside stock without": Pair(
        stock(*PADDED), plugin(*PADDED, *GRAPHS)
    ),
    f"the same and `{REUSE}`": Pair(stock(*PADDED), plugin(*PADDED, *GRAPHS, REUSE)),
    "`step: fused`, `--clip-grad 0`": Pair(
        stock(*OVERLAP, *UNCLIPPED), fused(*OVERLAP, *UNCLIPPED)
    ),
    "`step: fused`, `--clip-grad 0`, expert parallel 2": Pair(
        stock(*EXPERTS_APART, *OVERLAP, *UNCLIPPED), fused(*EXPERTS_APART, *OVERLAP, *UNCLIPPED)
    ),
    f"`step: fused`, `{STEP_GRAPH}`, beside the same without": Pair(
        fused(*TRACKED), fused(*TRACKED, STEP_GRAPH)
    ),
    "`step: fused`, `--cuda-graph-impl full_iteration`, beside the same without": Pair(
        fused(*PADDED), fused(*PADDED, *GRAPHS)
    ),
    "`step: fused`, both graphs, beside neither": Pair(
        fused(*PADDED), fused(*PADDED, *GRAPHS, STEP_GRAPH)
    ),
    "per-tensor scaling (`--fp8-recipe tensorwise`), both overlaps": Pair(
        stock(*TENSORWISE, *OVERLAP), plugin(*TENSORWISE, *OVERLAP)
    ),
    "per-tensor scaling, expert parallel 2": Pair(
        stock(*TENSORWISE, *EXPERTS_APART), plugin(*TENSORWISE, *EXPERTS_APART)
    ),
    "per-tensor scaling, bf16 moments": Pair(
        stock(*TENSORWISE, *NARROW), plugin(*TENSORWISE, *NARROW)
    ),
    "per-tensor scaling, `step: fused`, `--clip-grad 0`": Pair(
        stock(*TENSORWISE, *OVERLAP, *UNCLIPPED), fused(*TENSORWISE, *OVERLAP, *UNCLIPPED)
    ),
    "bf16 weights, both overlaps": Pair(
        stock(*OVERLAP, in_bf16=True), plugin(*OVERLAP, in_bf16=True)
    ),
    "bf16 weights, `step: fused`, `--clip-grad 0`": Pair(
        stock(*OVERLAP, *UNCLIPPED, in_bf16=True), fused(*OVERLAP, *UNCLIPPED, in_bf16=True)
    ),
    "bf16 weights, `step: fused`, `--optimizer-cpu-offload`, beside the same without": Pair(
        fused(*OVERLAP, in_bf16=True), fused(*OVERLAP, *OFFLOAD, in_bf16=True), on_cpu=True
    ),
    "bf16 weights, `--use-nccl-ub` on both sides": Pair(
        stock(*REGISTERED, in_bf16=True), plugin(*REGISTERED, in_bf16=True)
    ),
}
"""Enabled flags -> runs with and without them."""

NUMBER = r"([-+.\dE]+|nan|inf)"
PRINTED = {
    "losses": re.compile(rf"iteration +\d+/.*? lm loss: {NUMBER} "),
    "grad_norms": re.compile(rf"iteration +\d+/.*? grad norm: {NUMBER} "),
    "validation_losses": re.compile(
        rf"validation loss at iteration \d+ .*?lm loss value: {NUMBER} "
    ),
}
"""Compared quantity -> pattern in the log."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    folder: Path
    ranks: int
    cpu: bool

    def command(self, side: Side) -> list[str]:
        """Return the command as typed in the folder of the script."""
        words = ["torchrun", "--nproc-per-node", str(self.ranks)]
        if side.knobs is not None or self.cpu:  # needs the setup of `run`
            words += ["--no-python", "moe-optim", "run"]
        return [*words, SCRIPT[0], *side.arguments(cpu=self.cpu)]

    def argv(self, side: Side) -> list[str]:
        """Return the command as this process starts it, beside others."""
        meant = self.command(side)
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        for word in meant[1:]:
            words += (
                [sys.executable, "-m", "moe_optim.commands.cli.main"]
                if word == "moe-optim"
                else [word]
            )
        return words

    def run(self, side: Side, number: int) -> dict[str, Any]:
        """Train and return the record, without losses if some were not printed."""
        log = self.folder / f"{number}.log"
        environment = os.environ | ENVIRONMENT | ({"MOE_OPTIM_CPU": "1"} if self.cpu else {})
        with log.open("w") as file:
            done = subprocess.run(
                self.argv(side),
                cwd=self.folder,
                env=environment,
                stdout=file,
                stderr=file,
                check=False,
            )
        text = log.read_text(errors="replace")
        found = {what: place.findall(text) for what, place in PRINTED.items()}
        if done.returncode:
            print(f"ENDED WITH {done.returncode}: {side.name}\n{text[-3000:]}", file=sys.stderr)
        if len(found["losses"]) < int(MODEL[MODEL.index("--train-iters") + 1]):
            found = {"losses": []}
        return {"command": shlex.join(self.command(side)), "exit": done.returncode, **found}


def is_equal(runs: Mapping[str, Mapping[str, Any]], pair: Pair) -> bool:
    """Return whether two runs printed the same losses, norms and evaluations, with the same exit.

    Megatron itself exits with an error after the last evaluation under some flags.
    """
    one, other = (runs[side.name] for side in pair.sides)
    printed = all(one.get(what) and one[what] == other.get(what) for what in PRINTED)
    return printed and one.get("exit") == other.get("exit")


def chosen(words: Sequence[str], *, cpu: bool) -> dict[str, Pair]:
    """Return the pairs with one of the words in their names; without words, all that run here."""
    return {
        name: pair
        for name, pair in PAIRS.items()
        if (not words or any(word in name for word in words)) and (pair.on_cpu or not cpu)
    }


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="python -m tools.upstream.flags")
    parser.add_argument("--megatron-lm", type=Path, required=True, help="a checkout")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--at-once", type=int, default=1, help="runs beside each other")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--pairs", nargs="+", default=[], metavar="WORDS")
    args = parser.parse_args(words)
    pairs = chosen(args.pairs, cpu=args.cpu)
    if not pairs:
        parser.error(f"--pairs: expected words of {'; '.join(PAIRS)}, got {args.pairs}")
    sides = list(dict.fromkeys(side for pair in pairs.values() for side in pair.sides))
    command = shlex.join(["python", "-m", "tools.upstream.flags", *words])
    report = begin_report(command, on_gpu=not args.cpu, ranks=args.ranks)
    with tempfile.TemporaryDirectory(prefix="flags-") as folder:
        for name in SCRIPT:
            shutil.copy2(args.megatron_lm / name, folder)
        asked = Asked(folder=Path(folder), ranks=args.ranks, cpu=args.cpu)
        with ThreadPoolExecutor(args.at_once) as pool:
            done = pool.map(asked.run, sides, range(len(sides)))
            runs = {side.name: run for side, run in zip(sides, done, strict=True)}
    differing = [name for name, pair in pairs.items() if not is_equal(runs, pair)]
    report |= {
        "script": f"{SCRIPT[0]} of a checkout of Megatron-LM, unmodified",
        "ranks": args.ranks,
        "environment": " ".join(f"{name}={value}" for name, value in ENVIRONMENT.items()),
        "pairs": [
            {"with": name, "of": [side.name for side in pair.sides]} for name, pair in pairs.items()
        ],
        "runs": runs,
    }
    args.json.write_text(json.dumps(report, indent=1) + "\n")
    table = Table("turned on", "last loss beside it", "last loss with it", "all equal")
    for name, pair in pairs.items():
        last = [(runs[side.name]["losses"] or ["none"])[-1] for side in pair.sides]
        table.add_row(name, *last, "no" if name in differing else "yes")
    Console().print(table)
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(main())
