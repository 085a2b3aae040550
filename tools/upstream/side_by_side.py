"""Runs Megatron-LM's own unit tests without and with moe_optim, and compares case by case.

    python -m tools.upstream.side_by_side --megatron-lm PATH [--ranks N] [--json FILE] ...

PATH is a checkout, or a folder with its ``tests/unit_tests``; Megatron itself is the installed one.
``--transformer-engine PATH`` does the same for Transformer Engine's ``tests/pytorch``, which need
GPUs, with this package's kernels in place of its own. A case counts if it passes without the
plug-in, and must then pass with it. Cases that stock skips, fails, or passes by chance are listed
with the reason. Exit status: 1 with an unexplained difference, or without any case that counts.
"""

import argparse
import json
import multiprocessing
import os
import platform
import re
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from benchmarks.provenance import kernels
from moe_optim.commands.console.provenance import commit
from moe_optim.commands.train.launcher import RankFailure, launch, rank_environment
from moe_optim.environment import find_gpus
from tools.upstream.engine_version import versions_of_ranks

HERE = Path(__file__).parent
WORST_LAST = ("passed", "skipped", "failed", "error", "died")


@dataclass(frozen=True, kw_only=True)
class Selection:
    file: str
    """Path below ``tests/unit_tests``, or ``tests/pytorch`` of Transformer Engine."""
    knobs: str = ""
    keyword: str = ""
    replaced: Literal["never", "on cpus", "always"] = "never"
    """Condition for computing Transformer Engine's GEMMs and casts in torch, on both sides."""
    of: str = "megatron-lm"
    """Owner of the file: "megatron-lm" or "transformer-engine"."""
    opened: bool = False
    """Whether both sides run Blackwell-only tests that Hopper supports."""


SELECTIONS = (  # the longest first
    Selection(file="test_fp8_param.py", knobs="format=fp8_block layout=stock", keyword="blockwise"),
    # nothing quantized: buffers must be Megatron's to the byte, also where layout is aligned
    Selection(file="distributed/test_param_and_grad_buffer.py", knobs="format=mxfp8"),
    # experts of 16 columns: no quantized format has blocks that small
    Selection(file="dist_checkpointing/test_optimizer.py", knobs="format=bf16"),
    Selection(file="distributed/test_param_layout.py", knobs="format=mxfp8"),
    Selection(file="optimizer/test_distrib_optimizer_grouped_quantized.py", knobs="format=mxfp8"),
    Selection(
        file="transformer/moe/test_moe_single_grouped_weight_numerics.py",
        knobs="format=auto",
        replaced="always",
    ),
    Selection(file="transformer/moe/test_grouped_mlp.py", knobs="format=bf16", replaced="on cpus"),
    Selection(
        file="transformer/test_transformer_engine_grouped_linear.py",
        knobs="format=mxfp8",
        replaced="on cpus",
    ),
    Selection(file="models/test_hybrid_moe_model.py", knobs="format=bf16"),
    Selection(file="distributed/test_cast_master_weights_to_fp8.py", of="transformer-engine"),
    Selection(file="test_fused_optimizer.py", of="transformer-engine"),
    Selection(
        file="mxfp8/test_mxfp8_master_weight_empty_shard.py", of="transformer-engine", opened=True
    ),
    Selection(file="test_partial_cast.py", of="transformer-engine", opened=True),
)
"""Selections that run by default."""

CHANCE = {
    # Its first finish_grad_sync() marks a reduction as finished that starts later; the last one
    # therefore waits for nothing. With torch.cuda._sleep() before the reduction stock always fails.
    "distributed/test_param_and_grad_buffer.py::test_grad_sync[2-False-True-True]": (
        "reads gradients on one stream while another reduces them"
    ),
}
"""Cases that stock passes or fails by chance -> reason. Listed, never counted."""

EXPLAINED = {
    "transformer/moe/test_moe_single_grouped_weight_numerics.py::"
    "TestMoESingleGroupedWeightNumerics::"
    "test_single_grouped_weight_ddp_param_data_remap_data_ptr[nvfp4]": (
        "asks Megatron's buffer for its own map of packed NVFP4 bytes; these weights lie in buffers"
    ),
}
"""Cases that count but differ with the plug-in -> why that is no defect."""

SIDES: Mapping[str, tuple[str, ...]] = {
    "stock": ("outcome_lines", "prepare_megatron"),
    "plug-in": ("outcome_lines", "prepare_megatron", "with_moe_optim"),
}
"""Side -> pytest plug-ins of its ranks, found in this folder."""

ENGINE_SIDES: Mapping[str, tuple[str, ...]] = {
    "stock": ("outcome_lines",),
    "plug-in": ("outcome_lines", "engine_with_moe_optim"),
}
"""The same for Transformer Engine's files, whose tests start their ranks themselves."""

_REFUSAL = "PatchError: "
"""Beginning of the last words of a rank whose Megatron is refused by name."""

MANAGED = "ManagedBucket.open_gather"
"""Function that runs only where a managed bucket gathers its weights from masters."""


@dataclass
class Case:
    """Outcome of one case on one side: the worst of all ranks."""

    outcome: str = "passed"
    reason: str = ""
    seconds: float = 0.0
    ran: list[str] = field(default_factory=list)
    """Functions of moe_optim that it ran."""

    def note(self, outcome: str, reason: str) -> None:
        """Keep an outcome if it is worse than the current one."""
        if WORST_LAST.index(outcome) > WORST_LAST.index(self.outcome):
            self.outcome, self.reason = outcome, reason


_MISSING = Case(outcome="died", reason="never reached")


@dataclass(frozen=True, kw_only=True)
class Job:
    tests: Path
    selection: Selection
    side: str
    plugins: Sequence[str]
    ranks: int
    cpu: bool
    timeout_s: float
    restarts: int
    logs: Path


def run(job: Job) -> dict[str, Case]:
    """Run a selection to its end, restarting after every case in which a rank dies or hangs."""
    cases: dict[str, Case] = {}
    for attempt in range(job.restarts + 1):
        logs = job.logs / job.selection.file.replace("/", ".") / job.side / str(attempt)
        failure = _launch(job, logs, cases)
        seen, ended_by, stopped_in = _read(logs)
        if failure is None:
            return cases | seen
        culprit = stopped_in.get(failure.rank, job.selection.file)
        cases |= {name: case for name, case in seen.items() if ended_by[name] == job.ranks}
        cases[culprit] = seen.get(culprit, Case())
        cases[culprit].note("died", _how_it_ended(failure, job.timeout_s))
        if culprit == job.selection.file:  # outside of any case
            break
    return cases


def _launch(job: Job, logs: Path, done: Collection[str]) -> RankFailure | None:
    logs.mkdir(parents=True)
    (logs / "left_out.txt").write_text("\n".join(done))
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "root"
        root.mkdir()
        (root / "tests").symlink_to(job.tests.parent.resolve())  # without the checkout's Megatron
        tests = root / "tests" / job.tests.name
        entry = [sys.executable, "-m", "pytest", str(tests / job.selection.file)]
        entry += ["-c", os.devnull, "--rootdir", str(tests), "-sq"]
        entry += ["-p", "no:cacheprovider", "-p", "no:faulthandler"]
        where = {"always"} | ({"on cpus"} if job.cpu else set())
        replaced = ("replaced_products",) if job.selection.replaced in where else ()
        opened = ("opened_casts",) if job.selection.opened else ()
        entry += [word for plugin in (*job.plugins, *replaced, *opened) for word in ("-p", plugin)]
        entry += ["-k", job.selection.keyword]
        entry += ["--lines", str(logs), "--case-timeout", str(job.timeout_s)]
        entry += ["--leave-out", str(logs / "left_out.txt")]
        path = [str(root), str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
        environment = {
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTEST_DEBUG_TEMPROOT": folder,  # ranks of a side share folders, sides do not
            "MOE_OPTIM_SET": job.selection.knobs,
        }
        result = launch(
            entry,
            ranks=job.ranks,
            logs=logs,
            environment=rank_environment(job.ranks, cpu=job.cpu) | environment,
            is_shown=False,
        )
    if result.stopped_by:
        raise KeyboardInterrupt
    return result.failure


def _read(logs: Path) -> tuple[dict[str, Case], Counter[str], dict[int, str]]:
    """Return all cases, the number of ranks that ended each, and where a rank stopped."""
    cases: dict[str, Case] = {}
    ended_by: Counter[str] = Counter()
    stopped_in: dict[int, str] = {}
    lines = [
        (int(path.stem.removeprefix("rank")), json.loads(line))
        for path in logs.glob("rank*.jsonl")
        for line in path.read_text().splitlines()
    ]
    for rank, line in sorted(
        lines, key=lambda one: one[1]["at"]
    ):  # the first failure is the reason
        name = line["case"]
        case = cases.setdefault(name, Case())
        case.note(line["outcome"], line.get("reason", ""))
        case.seconds = max(case.seconds, line.get("seconds", 0.0))
        case.ran = sorted({*case.ran, *line.get("ran", [])})
        stopped_in[rank] = name
        if line["when"] == "teardown":
            ended_by[name] += 1
            del stopped_in[rank]
    return cases, ended_by, stopped_in


def _how_it_ended(failure: RankFailure, timeout_s: float) -> str:
    log = failure.logs / "stderr.log"
    if re.search(r"Timeout \([\d:.]+\)!", log.read_text(errors="replace")):  # faulthandler's
        return f"rank {failure.rank} did not end it within {timeout_s:g} s, see {log}"
    last_line = log.read_text(errors="replace").strip().rpartition("\n")[2]
    return last_line if _REFUSAL in last_line else failure.sentence()


@dataclass
class Comparison:
    selection: Selection
    stock: dict[str, Case]
    plug_in: dict[str, Case]

    def counted(self) -> list[str]:
        """Return the cases that pass without the plug-in, except by chance."""
        return [
            name
            for name, case in self.stock.items()
            if case.outcome == "passed" and name not in CHANCE
        ]

    def not_counted(self) -> list[str]:
        """Return the cases that stock skips, fails, never reaches or passes by chance."""
        counted = set(self.counted())
        return [name for name in {**self.stock, **self.plug_in} if name not in counted]

    def refusal(self) -> str | None:
        """Return the reason why the plug-in refuses this Megatron, if it does."""
        reason = self.plug_in.get(self.selection.file, _MISSING).reason
        return reason if _REFUSAL in reason else None

    def differences(self) -> dict[str, Case]:
        """Return the counted cases that do not pass with the plug-in, if it is not refused."""
        if self.refusal():
            return {}
        found = {name: self.plug_in.get(name, _MISSING) for name in self.counted()}
        return {name: case for name, case in found.items() if case.outcome != "passed"}

    def unexplained(self) -> dict[str, Case]:
        """Return the differences that are not in :data:`EXPLAINED`."""
        found = self.differences().items()
        return {name: case for name, case in found if name not in EXPLAINED}

    def ran(self, *functions: str) -> int:
        """Return the number of counted cases that ran any of ``functions``, or any of ours."""
        ran = [set(self.plug_in[name].ran) for name in self.counted() if name in self.plug_in]
        return sum(bool(of_case & {*functions} if functions else of_case) for of_case in ran)


def compare(jobs: Sequence[Job], at_once: int = 1) -> list[Comparison]:
    """Run jobs, ``at_once`` in parallel, and return one result per pair of consecutive jobs."""
    if at_once > 1:  # the launcher needs the main thread of a process
        with ProcessPoolExecutor(at_once, multiprocessing.get_context("spawn")) as pool:
            results = list(pool.map(run, jobs))
    else:
        results = [run(job) for job in jobs]
    pairs = zip(jobs[::2], results[::2], results[1::2], strict=True)
    return [Comparison(job.selection, stock, plug_in) for job, stock, plug_in in pairs]


def show(comparisons: Sequence[Comparison], console: Console) -> None:
    table = Table(
        "file", "stock", "with the plug-in", "counted", "in our code", "managed", "differ"
    )
    for one in comparisons:
        counts = [
            ", ".join(f"{n} {outcome}" for outcome, n in Counter(c.outcome for c in side).items())
            for side in (one.stock.values(), one.plug_in.values())
        ]
        numbers = (len(one.counted()), one.ran(), one.ran(MANAGED), len(one.differences()))
        table.add_row(one.selection.file, *counts, *map(str, numbers))
    console.print(table)
    for one in comparisons:
        if reason := one.refusal():
            console.print(f"refused: {one.selection.file}: {reason}", markup=False)
        for name in one.not_counted():
            stock, plug_in = (side.get(name, _MISSING) for side in (one.stock, one.plug_in))
            reason = CHANCE.get(name, stock.reason)
            other = "" if stock.outcome == plug_in.outcome else f"; plug-in: {plug_in.outcome}"
            console.print(f"not counted: {name}: {stock.outcome}: {reason}{other}", markup=False)
    for one in comparisons:
        for name, case in one.differences().items():
            why = EXPLAINED.get(name, case.reason)
            kind = "differs" if name in EXPLAINED else "DIFFERS"
            console.print(f"{kind}: {name}: {case.outcome}: {why}", markup=False)


def exit_status(comparisons: Sequence[Comparison]) -> int:
    """Return 0 if there are counted cases, no unexplained differences and no refusal."""
    is_same = not any(one.unexplained() or one.refusal() for one in comparisons)
    return 0 if is_same and any(one.counted() for one in comparisons) else 1


def merge(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record of both runs, which has the later outcomes of files that both ran.

    Raises:
        ValueError: the runs were not made alike.
    """
    for key in ("device", "versions", "ranks"):
        if old[key] != new[key]:
            raise ValueError(f"--keep: expected {key} {old[key]} as in the record, got {new[key]}")
    keys = ("command", "commit", "kernels")
    both = {key: ", ".join(dict.fromkeys([old[key], new[key]])) for key in keys if key in old}
    files = {file["selection"]["file"]: file for file in (*old["files"], *new["files"])}
    return {**old, **both, "files": list(files.values())}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.upstream.side_by_side")
    parser.add_argument("--megatron-lm", type=Path, help="folder with tests/")
    parser.add_argument("--transformer-engine", type=Path, help="the same of its sources")
    parser.add_argument(
        "--files", nargs="+", help="of the default selection, by a part of its name"
    )
    parser.add_argument("--keyword", help="pytest -k instead of the default selection's")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", action="store_true", help="files of --json that do not run")
    parser.add_argument("--logs", type=Path)
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds that a case may take")
    parser.add_argument("--restarts", type=int, default=4, help="after cases in which a rank died")
    parser.add_argument("--jobs", type=int, default=1, help="files and sides that run at once")
    args = parser.parse_args(argv)
    gpus = find_gpus()
    suites = {
        "megatron-lm": (args.megatron_lm, "tests/unit_tests", SIDES, args.ranks),
        "transformer-engine": (args.transformer_engine, "tests/pytorch", ENGINE_SIDES, 1),
    }
    chosen = [
        (replace(one, keyword=args.keyword or one.keyword), *suites[one.of])
        for one in SELECTIONS
        if suites[one.of][0] and (not args.files or any(part in one.file for part in args.files))
    ]
    jobs = [
        Job(
            tests=folder / tests,
            selection=selection,
            side=side,
            plugins=plugins,
            ranks=ranks,
            cpu=not gpus,
            timeout_s=args.timeout,
            restarts=args.restarts,
            logs=args.logs or Path(tempfile.mkdtemp(prefix="side-by-side-")),
        )
        for selection, folder, tests, sides, ranks in chosen
        for side, plugins in sides.items()
    ]
    comparisons = compare(jobs, args.jobs)
    show(comparisons, Console(width=160, soft_wrap=True))
    if args.json:
        report = {
            "command": shlex.join(["python", "-m", "tools.upstream.side_by_side", *sys.argv[1:]]),
            "commit": commit(),
            **kernels(on_gpu=bool(gpus)),
            "device": [gpu.name for gpu in gpus] or f"{platform.machine()} CPU",
            "versions": versions_of_ranks(),
            "ranks": args.ranks,
            "files": [asdict(one) for one in comparisons],
        }
        if args.keep:
            report = merge(json.loads(args.json.read_text()), report)
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return exit_status(comparisons)


if __name__ == "__main__":
    raise SystemExit(main())
