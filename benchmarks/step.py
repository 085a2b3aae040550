"""``python -m benchmarks step``: training steps of a recipe, with the plug-in and with stock.

Both sides alternate, each in fresh processes with the same arguments and data, so that disturbances
of the machine affect both. Iterations alternate, too: undisturbed ones give the iteration time,
others the times of its parts or the optimizer's host time.
"""

import argparse
import json
import os
import shlex
import sys
import textwrap
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.step_figures import SIDES, Measured, meanings, merge, summarize, table_of
from benchmarks.step_picture import draw, picture_path
from moe_optim.checkpoint.files.publishing import require_writable
from moe_optim.config.recipes import Recipe, check_requirements, load_recipe
from moe_optim.errors import ConfigError
from moe_optim.integration.argv import (
    add_changes,
    add_recipe,
    data_flags,
    flags,
    last_value,
    spell_format,
    without_options,
)
from moe_optim.screen import fail, print_table, results_console

# Imports of torch and Megatron take seconds, and are local to functions.

DETERMINISTIC_ENVIRONMENT = {
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
}
DETERMINISTIC_ARGUMENTS = ("--deterministic-mode", "--clip-grad", "0")
"""Disables clipping: its norm is summed in bucket order, which differs between the sides."""
CLIP_GRAD = 1.0
"""Megatron's default."""
OPTIMIZERS = ("adam", "muon")
QUANTIZED_WEIGHTS = ("--fp8-param-gather", "--fp4-param-gather")
"""Flags that stock's side leaves out with Muon, whose weights are then bf16."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``benchmarks step``."""
    description = (
        "Train a recipe for a few iterations with the plug-in and with Megatron's own optimizer, "
        "alternately, and compare times, bytes and memory. Arguments after `--` go to Megatron's "
        "parser on both sides, and override the recipe's."
    )
    parser = subparsers.add_parser(
        "step",
        help="training steps of a recipe, compared with stock Megatron",
        description=textwrap.fill(description, 96),
        epilog=meanings(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="python -m benchmarks step RECIPE [options] [-- MEGATRON ARGS]",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add_recipe(parser, "hopper_fp8_block")
    other = "other side: stock Megatron (default), or this plug-in with `compute: null`"
    add("--against", choices=["stock", "bf16"], default="stock", help=other)
    add("--iterations", type=int, default=21, metavar="N", help="per process (default 21)")
    add("--rounds", type=int, default=2, metavar="N", help="processes per side (default 2)")
    add("--ranks", type=int, metavar="N", help="ranks (default: the recipe's)")
    add_changes(parser, "moe_optim.layout=stock")
    optimizers = "optimizer of both sides; stock Muon's weights are bf16 (default: the recipe's)"
    add("--optimizer", choices=OPTIMIZERS, help=optimizers)
    repeats = "use only deterministic algorithms on both sides, and no clipping"
    add("--deterministic", action="store_true", help=repeats)
    add("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    add(
        "--out",
        type=picture_path,
        metavar="FILE",
        help="also draw the parts of a step: .png, .svg, .pdf or .jpg",
    )
    add("--logs", type=Path, metavar="DIR", help="keep the logs of all ranks in DIR")


def run(args: argparse.Namespace) -> int:
    """Measure both sides alternately, print a table, and write the requested files.

    Returns:
        Exit code: 0 done, 1 a rank failed, 128 + n stopped by signal n.

    Raises:
        ConfigError: a number, the recipe or an output file is invalid.
    """
    from benchmarks.step_rank import KINDS, WARM_UP

    fewest = WARM_UP + len(KINDS)
    if args.iterations < fewest or args.rounds < 1:
        raise ConfigError(
            f"--iterations, --rounds: expected at least {fewest} and 1, got {args.iterations} and "
            f"{args.rounds}. The first {WARM_UP} iterations are not counted, and each of the "
            f"next {len(KINDS)} shows something else."
        )
    recipe = load_recipe(args.recipe, args.set)
    check_requirements(recipe)
    require_writable(args.json, args.out)
    if args.against == "bf16" and recipe.moe_optim.compute is None:
        raise ConfigError(
            "--against bf16: expected moe_optim.compute in the recipe, got null. Give --set "
            "moe_optim.compute=mxfp4, or --against stock."
        )
    if args.ranks is not None and args.ranks < 1:
        raise ConfigError(f"--ranks: expected 1 or more, got {args.ranks}.")
    _check_muon(args, recipe)
    names = {(number, side): f"{number}-{side}" for number in range(args.rounds) for side in SIDES}
    _require_new(args.logs, names.values())
    if missing := missing_data(args, recipe):
        print(f"{recipe.path} names no data: added {shlex.join(missing)}", file=sys.stderr)
    with TemporaryDirectory() as temporary:
        logs = args.logs or Path(temporary)
        found: dict[str, list[Measured]] = {side: [] for side in SIDES}
        for (_, side), name in names.items():
            measured = _measure(args, recipe, side, (logs / name).resolve())
            if isinstance(measured, int):
                return measured
            found[side].append(measured)
    report = _report(args, recipe, found)
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    if args.out:
        args.out.write_bytes(draw(report, args.out))
    print_table(results_console(), table_of(report))
    return 0


def _check_muon(args: argparse.Namespace, recipe: Recipe) -> None:
    """Raise ConfigError if stock Muon would gather shards of several sizes over gloo."""
    import torch

    ranks = args.ranks or recipe.ranks
    on_gloo = ranks > 1 and not torch.cuda.is_available()
    if on_gloo and optimizer_of(megatron_argv(args, recipe, "stock")) == "muon":
        raise ConfigError(
            f"--optimizer muon: expected GPUs or one rank, got {ranks} ranks on a CPU: stock Muon "
            "gathers shards of several sizes, which gloo does not. Give --ranks 1."
        )


def _require_new(logs: Path | None, names: Collection[str]) -> None:
    """Raise ConfigError if a folder for logs exists, before any measurement."""
    there = [name for name in names if logs is not None and (logs / name).exists()]
    if there:
        raise ConfigError(
            f"--logs {logs}: expected no logs of an earlier bench, got {', '.join(there)}. Name "
            "another folder."
        )


def _python_path() -> str:
    """Return ``PYTHONPATH`` for ranks, which import this package as well."""
    given = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(Path(__file__).parents[1]), *([given] if given else [])])


def _measure(args: argparse.Namespace, recipe: Recipe, side: str, folder: Path) -> Measured | int:
    """Return the measurements of one side's ranks, or their exit code on failure."""
    import torch

    from benchmarks.step_rank import REPORT
    from moe_optim.commands.train.launcher import launch, rank_environment

    folder.mkdir(parents=True)
    ranks = args.ranks or recipe.ranks
    own = {REPORT: str(folder), "PYTHONPATH": _python_path(), **environment(args)}
    result = launch(
        [sys.executable, "-m", "benchmarks.step_rank", *megatron_argv(args, recipe, side)],
        ranks=ranks,
        logs=folder,
        environment=rank_environment(ranks, cpu=not torch.cuda.is_available()) | own,
        is_shown=False,
    )
    if result.stopped_by is not None:
        print(f"step: {side}: stopped by {result.stopped_by.name}", file=sys.stderr)
        return 128 + result.stopped_by
    what = f"step: {side}: expected"
    if result.failure is not None:
        return fail(f"{what} a run to its end, but {result.failure.sentence()}")
    measured = merge([json.loads((folder / f"rank{r}.json").read_text()) for r in range(ranks)])
    if len(measured.losses) != args.iterations:
        return fail(
            f"{what} {args.iterations} iterations, got {len(measured.losses)}. Keep the logs with "
            "--logs and look at stdout.log of rank 0."
        )
    return measured


def environment(args: argparse.Namespace) -> dict[str, str]:
    """Return the environment variables that this command's flags set for ranks."""
    return dict(DETERMINISTIC_ENVIRONMENT) if args.deterministic else {}


def megatron_argv(args: argparse.Namespace, recipe: Recipe, side: str) -> list[str]:
    """Return the command line of a rank, equal for both sides except for the plug-in's flags.

    With ``--against bf16`` both sides have them, and ``stock`` leaves out ``compute``.
    """
    argv = [*recipe.megatron_argv(), *(DETERMINISTIC_ARGUMENTS if args.deterministic else ())]
    argv += ["--optimizer", args.optimizer] if args.optimizer else []
    argv += [
        *args.megatron_args,
        *missing_data(args, recipe),
        "--train-iters",
        str(args.iterations),
    ]
    argv += ["--eval-iters", "0", "--timing-log-level", "0"]
    argv += ["--log-interval", "1"]  # logging synchronizes the device after every iteration
    is_stock = side == "stock" and args.against == "stock"
    if is_stock and optimizer_of(argv) == "muon":
        argv = without_options(argv, QUANTIZED_WEIGHTS)
    if not is_stock:
        without = {"compute": None} if side == "stock" else {}
        argv += ["--use-moe-grouped-optim"]
        for name, value in (asdict(recipe.moe_optim) | without).items():
            argv += ["--moe-optim-set", f"{name}={json.dumps(value)}"]  # JSON is YAML too
    return argv


def optimizer_of(argv: Sequence[str]) -> str:
    """Return the optimizer of a command line, ``muon`` by its deprecated name, too."""
    return (last_value(argv, "--optimizer") or "adam").removeprefix("dist_")


def missing_data(args: argparse.Namespace, recipe: Recipe) -> list[str]:
    """Return the arguments that let a recipe without data train on mock data."""
    argv = [*recipe.megatron_argv(), *args.megatron_args]
    if data_flags(argv):
        return []
    given = flags(argv)
    tokenizer = [] if "--tokenizer-type" in given else ["--tokenizer-type", "NullTokenizer"]
    vocabulary = [] if "--vocab-size" in given else ["--vocab-size", "255"]
    return ["--mock-data", *tokenizer, *vocabulary]


def _report(
    args: argparse.Namespace, recipe: Recipe, found: dict[str, list[Measured]]
) -> dict[str, Any]:
    import torch

    from benchmarks.provenance import begin_report
    from benchmarks.step_rank import WARM_UP

    argv = megatron_argv(args, recipe, "plugin")
    ranks = args.ranks or recipe.ranks
    return {
        **begin_report(_command(args), on_gpu=torch.cuda.is_available(), ranks=ranks),
        "workload": {
            "recipe": str(recipe.path),
            "format": spell_format(recipe.moe_optim.format, argv),
            "compute": recipe.moe_optim.compute,
            "against": args.against,
            "optimizer": optimizer_of(argv),
            "portable_experts": last_value(argv, "--transformer-impl") == "local",
            "clip_grad": float(last_value(argv, "--clip-grad") or CLIP_GRAD),
            "ranks": ranks,
            "iterations": args.iterations - WARM_UP,
            "rounds": args.rounds,
            "deterministic": args.deterministic,
            "megatron_args": args.megatron_args,
        },
        **summarize(found),
    }


def _command(args: argparse.Namespace) -> str:
    words = ["python", "-m", "benchmarks", "step", str(args.recipe), "--against", args.against]
    words += ["--iterations", str(args.iterations), "--rounds", str(args.rounds)]
    words += ["--ranks", str(args.ranks)] if args.ranks else []
    words += ["--set", *args.set] if args.set else []
    words += ["--optimizer", args.optimizer] if args.optimizer else []
    words += ["--deterministic"] if args.deterministic else []
    words += ["--json", str(args.json)] if args.json else []
    words += ["--", *args.megatron_args] if args.megatron_args else []
    return shlex.join(words)
