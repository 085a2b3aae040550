"""Runs another project's training stack beside its own state, and records what was seen.

    python -m tools.stacks bridge [--path FOLDERS] [--recipes NAMES] [--formats NAMES]
        [--ranks NUMBERS] [--gpus] [--at-once CASES] [--logs FOLDER] [--json FILE]
    python -m tools.stacks slime|miles|verl|nemo_rl --source FOLDER [--path FOLDERS]
        [--install FOLDER] [--megatron FOLDER] [--bridge FOLDER]

The second form runs the tests that call the stack's own code, on CPU ranks. verl and NeMo-RL import
Megatron-Bridge and other packages: --install has pip put them into a folder without any, and
--path names folders that hold them. --megatron and --bridge name code of Megatron-LM and
Megatron-Bridge to run in place of releases: NeMo-RL's worker needs the main branches. The source of
each is a work tree, or a repository without one.

Run the first form with the Python of an environment that holds the stack, or name folders with it
and all that it imports, separated by colons. The record keeps other cases of the same device and
versions, with their command and commit, so that a run can be done in parts. With --gpus a rank has
a GPU of its own, and layers are Transformer Engine's; otherwise ranks are CPU processes. Exit
status: 1 if a case of the plug-in stops where stock does not.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tools.stacks.environment import (
    TESTS,
    install_packages,
    run_tests,
    unpack,
    unpack_megatron,
)

CODE = ("source", "install", "megatron", "bridge")
"""Options that name code for tests of a stack."""


def main(words: Sequence[str]) -> int:
    """Run the cases that the command line names; return the exit status."""
    args = _parse(words)
    if args.stack != "bridge":
        return _run_tests(args)
    sys.path[:0] = args.path.split(":") if args.path else []
    from benchmarks.provenance import begin_report
    from tools.stacks import bridge

    if not args.gpus:
        bridge.import_stack()
    report = begin_report(shlex.join(["python", "-m", "tools.stacks", *words]), on_gpu=args.gpus)
    report["versions"]["megatron-bridge"] = importlib.metadata.version("megatron-bridge")
    formats = args.formats or (bridge.GPU_FORMATS if args.gpus else bridge.CPU_FORMATS)
    cases = [
        bridge.Case(recipe, format, ranks, args.gpus)
        for recipe in args.recipes or bridge.RECIPES
        for ranks in args.ranks
        for format in formats
    ]

    kept = _kept(args.json, cases, report) if args.json else {}

    def run(case: Any) -> dict[str, Any]:
        logs = args.logs / f"{case.recipe} {case.format} {case.ranks}"
        found = dataclasses.asdict(case) | bridge.run_case(case, logs)
        print(json.dumps(found), flush=True)
        return found

    report["cases"] = []
    with ThreadPoolExecutor(args.at_once) as pool:
        # on a CPU ranks are forked from this thread, which has chosen it
        for found in pool.map(run, cases) if args.gpus else map(run, cases):
            report["cases"].append(found)
            if args.json:  # after each case: a run is long
                args.json.write_text(json.dumps(_joined(kept, report), indent=1) + "\n")
    return int(any(map(_is_ours, _stopped_alone(report["cases"]))))


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.stacks")
    parser.add_argument("stack", choices=["bridge", *TESTS])
    parser.add_argument("--path", help="folders with packages of the stack, separated by colons")
    parser.add_argument("--source", type=Path, help="folder with the stack's code; not for bridge")
    parser.add_argument("--install", type=Path, metavar="FOLDER", help="for what --path names")
    parser.add_argument("--megatron", type=Path, help="folder with Megatron-LM's code")
    parser.add_argument("--bridge", type=Path, help="folder with Megatron-Bridge's code")
    parser.add_argument("--recipes", nargs="+")
    parser.add_argument("--formats", nargs="+")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--gpus", action="store_true")
    parser.add_argument("--at-once", type=int, default=1, metavar="CASES", help="with --gpus")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()) / "stacks")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(words)
    if args.stack != "bridge" and args.source is None:
        parser.error(f"{args.stack}: expected --source with the folder of its code")
    if args.stack == "bridge" and any(map(vars(args).get, CODE)):
        parser.error(f"bridge: expected --path, got one of {', '.join(f'--{x}' for x in CODE)}")
    return args


def _run_tests(args: argparse.Namespace) -> int:
    if args.install:
        try:
            install_packages(args.install)
        except ValueError as error:
            print(f"--install {error}")
            return 1
    with tempfile.TemporaryDirectory(prefix=f"{args.stack}-") as name:
        folder = Path(name)
        megatron, bridge = args.megatron, args.bridge
        if megatron:
            megatron = unpack_megatron(megatron.resolve(), folder / "megatron")
        if bridge:
            bridge = unpack(bridge.resolve(), folder / "bridge", "src") / "src"
        packages = ":".join(str(one) for one in (bridge, args.path, args.install) if one)
        source = unpack(args.source.resolve(), folder / args.stack)
        return run_tests(args.stack, source, packages, megatron)


def _stopped_alone(cases: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return cases that stopped, except those whose stock run stopped, too."""
    stopped = [case for case in cases if "stopped" in case]
    stock = {_twin(case) for case in stopped if not _is_ours(case)}
    return [case for case in stopped if _twin(case) not in stock]


def _twin(case: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what a case shares with its stock run: weights in FP8 are compared with such."""
    return case["recipe"], case["ranks"], "fp8_block" in case["format"]


def _is_ours(case: Mapping[str, Any]) -> bool:
    return not str(case["format"]).startswith("stock")


def _kept(path: Path, cases: Sequence[Any], report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record in a file without the cases that will run again; empty if none is left.

    Raises:
        ValueError: the cases left ran on another device, or with other versions.
    """
    before: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"cases": []}
    again = {(case.recipe, case.format, case.ranks) for case in cases}
    left = [c for c in before["cases"] if (c["recipe"], c["format"], c["ranks"]) not in again]
    if not left:
        return {}
    for key in ("device", "versions"):
        if before[key] != report[key]:
            raise ValueError(
                f"{path}: {key}: expected {before[key]} as in the record, got {report[key]}. Name "
                "another file, or run all of its cases."
            )
    return before | {"cases": left}


def _joined(kept: Mapping[str, Any], report: dict[str, Any]) -> dict[str, Any]:
    """Return the report with cases kept from a record, and the commands and commits of both."""
    if not kept:
        return report
    keys = [key for key in ("command", "commit", "kernels") if key in report]
    both = {key: ", ".join(dict.fromkeys([kept[key], report[key]])) for key in keys}
    return report | both | {"cases": [*kept["cases"], *report["cases"]]}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
