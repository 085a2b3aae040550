"""Prints metrics of the package's size.

    python -m tools.figures [lines] [training] [step] [load] [arguments] [tests] [functions]

Without names, all: lines of moe_optim; lines that training imports; functions, files and call depth
of one fused step and of one checkpoint load, in moe_optim only; argument lines that begin without a
noun; lines of tests; the longest functions. The model is that of ``examples/train_small_moe.py``,
on one rank and a CPU.
"""

import argparse
import ast
import importlib.util
import inspect
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Any

from tools.prose import find_faults

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "moe_optim"
TRACED = "--traced"
"""First argument of the process that trains."""
PLAIN_TORCH = ("formats", "integration/cpu_runtime.py")
"""What runs on a CPU in place of kernels and CUDA."""
LONG = 60
"""Limit on lines of a function, without its docstring."""


def count_lines(files: Sequence[Path]) -> int:
    """Return the total number of lines of files."""
    return sum(path.read_text(encoding="utf-8").count("\n") for path in files)


def _lines_of_package() -> None:
    files = list(PACKAGE.rglob("*.py"))
    rooms: Counter[str] = Counter()
    for path in files:
        rooms[path.relative_to(PACKAGE).parts[0]] += count_lines([path])
    folders = {room: lines for room, lines in rooms.most_common() if "." not in room}
    print(f"lines of moe_optim: {count_lines(files):,} in {len(files)} files")
    print("  " + ", ".join(f"{room} {lines:,}" for room, lines in folders.items()))


def _lines_of_training() -> None:
    found = run_traced()["training"]
    print(f"lines that training imports: {found['lines']:,} in {found['files']} files")


def _lines_of_tests() -> None:
    for name in ("tests", "tools"):
        files = list((ROOT / name).rglob("*.py"))
        print(f"lines of {name}: {count_lines(files):,} in {len(files)} files")


def _print_calls(what: str, name: str) -> None:
    found = run_traced()[name]
    print(
        f"{what}: {found['functions']} functions in {found['files']} files, "
        f"{found['calls']:,} calls, {found['depth']} deep; without {' and '.join(PLAIN_TORCH)} "
        f"{found['own_functions']} in {found['own_files']}"
    )


def _argument_lines() -> None:
    print(f"argument lines that name no thing: {len(find_faults())}")


def _longest_functions() -> None:
    found = sorted(_functions(), reverse=True)
    over = sum(lines > LONG for lines, _ in found)
    print(f"functions: {len(found):,}, {over} above {LONG} lines; the longest:")
    for lines, name in found[:10]:
        print(f"  {lines:4} {name}")


def _functions() -> Iterator[tuple[int, str]]:
    """Yield the lines of every function without its docstring, and its location."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                doc = node.body[0] if ast.get_docstring(node) else None
                of_doc = (doc.end_lineno or 0) - doc.lineno + 1 if doc else 0
                lines = (node.end_lineno or 0) - node.lineno + 1 - of_doc
                yield lines, f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"


class CallCounter:
    """Counts the calls of moe_optim functions, those of threads that begin meanwhile included."""

    def __init__(self) -> None:
        self.functions: set[tuple[str, str, int]] = set()
        self.calls = self.depth = 0
        self._now: Counter[int] = Counter()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """Handle an event of ``sys.setprofile``."""
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(str(PACKAGE)):
            return
        if not code.co_flags & inspect.CO_OPTIMIZED:  # a module or a class that is imported
            return
        thread = threading.get_ident()
        self._now[thread] += 1 if event == "call" else -1
        if event == "call":
            self.calls += 1
            self.functions.add((code.co_filename, code.co_qualname, code.co_firstlineno))
            self.depth = max(self.depth, self._now[thread])

    def count(self, function: Callable[[], Any]) -> Any:
        """Call a function and count the calls it makes."""
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            return function()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def figures(self) -> dict[str, int]:
        """Return the counts to print."""
        plain = tuple(str(PACKAGE / name) for name in PLAIN_TORCH)
        own = {one for one in self.functions if not one[0].startswith(plain)}
        counts = {"calls": self.calls, "depth": self.depth}
        for kind, functions in (("", self.functions), ("own_", own)):
            files = {file for file, *_ in functions}
            counts |= {f"{kind}functions": len(functions), f"{kind}files": len(files)}
        return counts


@cache
def run_traced() -> dict[str, dict[str, int]]:
    """Return the counts of a process that trains, saves and loads."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    command = [sys.executable, "-W", "ignore", "-m", *launcher, "-m", "tools.figures", TRACED]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=-1, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def trace() -> None:
    """Train, save and load as the example does, and print the counts as JSON."""
    spec = importlib.util.spec_from_file_location("example", ROOT / "examples/train_small_moe.py")
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    sys.modules["example"] = example
    spec.loader.exec_module(example)
    example.dist.init_process_group("gloo")
    example.parallel_state.initialize_model_parallel()
    config = example.moe_optim.MoEOptimConfig(format="mxfp8", step="fused")
    example.moe_optim.install(config)
    model, optimizer = example.build()
    example.train(model, optimizer, range(1))
    modules = [name for name in sys.modules if name.partition(".")[0] == PACKAGE.name]
    found = [Path(file) for name in modules if (file := sys.modules[name].__file__)]
    training = {"lines": count_lines(found), "files": len(found)}
    example.train(model, optimizer, range(1, 3))  # plans are built by now
    of_step, of_load, take_step = CallCounter(), CallCounter(), optimizer.step
    optimizer.step = lambda: of_step.count(take_step)
    example.train(model, optimizer, range(3, 4))
    with tempfile.TemporaryDirectory() as folder:
        example.dist_checkpointing.save(example.checkpoint_state(model, optimizer), folder)
        template = example.checkpoint_state(model, optimizer, is_loading=True)

        def load() -> None:
            state = example.dist_checkpointing.load(template, folder)
            model.module.module.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])

        of_load.count(load)
    print(json.dumps({"training": training, "step": of_step.figures(), "load": of_load.figures()}))
    example.dist.destroy_process_group()


FIGURES: dict[str, Callable[[], None]] = {
    "lines": _lines_of_package,
    "training": _lines_of_training,
    "step": partial(_print_calls, "one fused step", "step"),
    "load": partial(_print_calls, "one load of a checkpoint", "load"),
    "arguments": _argument_lines,
    "tests": _lines_of_tests,
    "functions": _longest_functions,
}


def main() -> None:
    """Run from a command line."""
    if sys.argv[1:] == [TRACED]:
        trace()
        return
    parser = argparse.ArgumentParser(prog="python -m tools.figures", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(FIGURES))
    names = parser.parse_args().names or list(FIGURES)
    if unknown := [name for name in names if name not in FIGURES]:
        parser.error(f"expected some of {', '.join(FIGURES)}, got {', '.join(unknown)}")
    for name in names:
        FIGURES[name]()


if __name__ == "__main__":
    main()
