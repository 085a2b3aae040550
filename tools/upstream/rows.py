"""Runs the tests of the ten rows of Transformer Engine's experts, and records their losses.

    python -m tools.upstream.rows --json FILE [--gpus] [-n WORKERS] [--rest] [-k EXPRESSION]

Runs all cases of ``tests/weights/te/test_rows.py``, including extended ones; without ``--gpus`` on
a CPU, with Transformer Engine at TRANSFORMER_ENGINE_PATH. The record is written after every case
and lists cases that have not run; --rest runs those that have not passed. Exit status: 1 if a case
fails, or none passes.
"""

import argparse
import json
import platform
import shlex
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from benchmarks.provenance import kernels
from moe_optim.commands.console.provenance import commit
from moe_optim.environment import find_gpus
from tools.upstream.engine_version import versions_of_ranks

TESTS = Path(__file__).parents[2] / "tests" / "weights" / "te" / "test_rows.py"


@dataclass
class Row:
    cases: dict[str, str] = field(default_factory=dict)
    """Case -> passed, failed, skipped or not run."""
    failures: dict[str, str] = field(default_factory=dict)
    """Case -> first line of its failure."""
    runs: list[dict[str, Any]] = field(default_factory=list)
    """Settings of each launch, with losses and gradient norms of every step on rank 0."""


def split_case(id: str) -> tuple[str, str]:
    """Return a case without its file, and its row, one of its arguments."""
    case = id.partition("::")[2]
    arguments = case.partition("[")[2].removesuffix("]").split("-")
    return case, next(one for one in arguments if ", " in one)


class ByRow(LoadScopeScheduling):
    """Assigns all cases of a row, which share runs, to one worker."""

    def _split_scope(self, nodeid: str) -> str:
        return split_case(nodeid)[1]


class Recorder:
    """A pytest plug-in that writes the record after every event."""

    def __init__(self, path: Path, report: dict[str, Any], rows: Mapping[str, Row]) -> None:
        self.path = path
        self.report = report
        self.rows: defaultdict[str, Row] = defaultdict(Row, rows)

    def outcomes(self) -> set[str]:
        return {outcome for row in self.rows.values() for outcome in row.cases.values()}

    def rest(self) -> list[str]:
        cases = [one for row in self.rows.values() for one in row.cases.items()]
        return [case for case, outcome in cases if outcome != "passed"]

    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> ByRow:
        return ByRow(config, log)

    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        for case, row in map(split_case, ids):
            self.rows[row].cases.setdefault(case, "not run")
        self._write()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        case, name = split_case(report.nodeid)
        row = self.rows[name]
        if report.when == "call" or not report.passed:
            row.cases[case] = report.outcome
            row.failures.pop(case, None)
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            said = crash.message if crash else str(report.longrepr)
            row.failures[case] = said.partition("\n")[0][:300]
        if report.when == "call":
            for run in (value for key, value in report.user_properties if key == "run"):
                self.report["ranks"] = run.pop("ranks")
                runs = self.rows[run.pop("row")].runs
                if run not in runs:  # another row's case may have launched it, too
                    runs.append(run)
        self._write()

    def _write(self) -> None:
        rows = {name: asdict(row) for name, row in self.rows.items()}
        self.path.write_text(json.dumps(self.report | {"rows": rows}, indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="python -m tools.upstream.rows")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--gpus", action="store_true", help="a rank on each GPU")
    parser.add_argument("-n", type=int, default=1, dest="workers", help="launches at once")
    parser.add_argument("-k", default="", dest="keyword", help="cases, as pytest selects them")
    parser.add_argument("--rest", action="store_true", help="what has not passed in the record")
    args = parser.parse_args(words)
    gpus = [gpu.name for gpu in find_gpus()] if args.gpus else []
    report = {
        "command": shlex.join(["python", "-m", "tools.upstream.rows", *words]),
        "commit": commit(),
        **kernels(on_gpu=bool(gpus)),
        "device": gpus or f"{platform.machine()} CPU",
        "versions": versions_of_ranks(),
        "ranks": None,
    }
    rows: dict[str, Row] = {}
    if args.rest:
        old = json.loads(args.json.read_text())
        rows = {name: Row(**row) for name, row in old["rows"].items()}
        for key in ("device", "versions"):
            if old[key] != report[key]:
                parser.error(f"{args.json}: expected {key} {old[key]}, got {report[key]}")
        shared = old.keys() & report.keys()
        for key in shared & {"command", "commit", "kernels"}:  # of every run in the record
            report[key] = ", ".join(dict.fromkeys([old[key], report[key]]))
        report["ranks"] = old["ranks"]
    recorder = Recorder(args.json, report, rows)
    rest = recorder.rest()
    if rows and not rest:
        return 0
    command = [f"{TESTS}::{case}" for case in rest] or [str(TESTS)]
    command += ["-p", "no:cacheprovider", "-m", "extended or not extended"]
    command += ["-k", args.keyword, "-n", str(args.workers), *(["--gpus"] if args.gpus else [])]
    status = pytest.main(command, plugins=[recorder])
    return int(status != pytest.ExitCode.OK or "passed" not in recorder.outcomes())


if __name__ == "__main__":
    sys.exit(main())
