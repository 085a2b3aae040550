"""Runs the suite in a fresh environment with other versions of torch and Megatron, and records it.

    python -m tools.upstream.versions [--torch VERSION] [--megatron-core VERSION]
        [--transformer-engine VERSION] [--environment DIR] [--json FILE] [TESTS ...]
    python -m tools.upstream.versions --here [--json FILE] [TESTS ...]

``--megatron-core`` is a release, or the path of a checkout; TESTS are files or folders, by default
all. The record keeps other files of the same versions, so that a suite can be run in parts.
``--transformer-engine`` builds it and runs the GPU tests instead of the others. ``--here`` installs
nothing and runs the tests in the current environment, with Transformer Engine at
TRANSFORMER_ENGINE_PATH; only the GPU tests if there are GPUs. Exit status: 1 if a case fails.
"""

import argparse
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.provenance import kernels
from moe_optim.commands.console.provenance import commit, describe_cpu
from moe_optim.environment import find_gpus, find_package
from tools.upstream.engine_version import find_version

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "recipes" / "results" / "versions-cpu.json"

KNOWN: Mapping[str, tuple[str, ...]] = {
    "megatron-core": ("0.19.0", "0.19.2", "0.20.0"),
    "torch": ("2.11.0", "2.13.0", "2.15.0"),
    "transformer-engine": ("2.17.1", "2.18.0", "2.20.2"),
}
"""Common versions, oldest first; 0.20.0 is the version of a checkout of main."""

BESIDE = ("triton", "numpy", "torchao")
"""Other packages whose versions are recorded."""

ALL = ["tests"]

OUTCOMES = {"failure": "failed", "error": "failed", "skipped": "skipped"}
"""Element of pytest's XML report -> outcome."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    torch: str
    megatron_core: str
    transformer_engine: str | None

    @property
    def checkout(self) -> Path | None:
        return Path(self.megatron_core) if os.sep in self.megatron_core else None

    def command(self, tests: Sequence[str]) -> str:
        """Return the command that runs these tests with these versions."""
        core = self.checkout.name if self.checkout else self.megatron_core
        words = ["python", "-m", "tools.upstream.versions", "--torch", self.torch]
        words += ["--megatron-core", core]
        if self.transformer_engine:
            words += ["--transformer-engine", self.transformer_engine]
        return shlex.join([*words, *([] if list(tests) == ALL else tests)])

    def requirements(self) -> list[str]:
        """Return the requirements of the project file with these versions."""
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        extras = project["optional-dependencies"]
        own = [*project["dependencies"], *extras["megatron"], *extras["dev"]]
        pinned = {"torch", "megatron-core", "moe_optim"}  # the last: extras of its own
        kept = [line for line in own if re.match(r"[\w.-]+", line)[0] not in pinned]
        core = f"megatron-core=={self.megatron_core}" if self.checkout is None else ""
        return [f"torch=={self.torch}", core or str(self.checkout), *kept]


@dataclass
class Outcomes:
    commit: str | None
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    failures: dict[str, str] = field(default_factory=dict)
    """Case -> first line of its failure."""


def make_environment(folder: Path, wanted: Wanted) -> Path:
    """Install everything into a new environment unless it exists; return its Python."""
    python = folder / "bin" / "python"
    if python.exists():
        return python
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, *wanted.requirements()], check=True)
    if wanted.transformer_engine:  # built against the installed torch
        engine = f"transformer-engine[pytorch]=={wanted.transformer_engine}"
        subprocess.run([*pip, "--no-build-isolation", engine], check=True)
    subprocess.run([*pip, "--no-deps", "-e", str(ROOT)], check=True)
    return python


def run_suite(
    python: Path, tests: Sequence[str], environment: Mapping[str, str], *, gpus: bool
) -> dict[str, Outcomes]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += ["-o", "junit_family=xunit1", "--junitxml", str(report)]
        command += ["--gpus"] if gpus else ["-n", "logical", "--maxprocesses", "8"]
        command += [] if gpus else ["--dist", "loadfile"]
        subprocess.run([*command, *tests], cwd=ROOT, env=environment, check=False)
        if not report.exists():
            sys.exit(f"{shlex.join(command)}: expected a report, got none. See above.")
        return read_report(report)


def read_report(report: Path) -> dict[str, Outcomes]:
    """Return file -> outcomes from pytest's XML report (``xunit1``)."""
    files: dict[str, Outcomes] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.get("file") or case.get("classname") or case.get("name", "")
        of_file = files.setdefault(name, Outcomes(commit=commit()))
        said = [child for child in case if child.tag in OUTCOMES]
        outcome = OUTCOMES[said[0].tag] if said else "passed"
        setattr(of_file, outcome, getattr(of_file, outcome) + 1)
        if outcome == "failed":
            message = said[0].get("message") or ""
            of_file.failures[case.get("name", "")] = message.partition("\n")[0][:300]
    return files


def installed(python: Path) -> dict[str, str]:
    """Return package -> version of the suite's dependencies in an environment."""
    names = (*KNOWN, *BESIDE)
    program = (
        "import importlib.metadata as m, json, sys\n"
        "found = {d.name.lower().replace('_', '-'): d.version for d in m.distributions()}\n"
        "print(json.dumps({n: found[n] for n in sys.argv[1:] if n in found}))"
    )
    asked = subprocess.run(
        [str(python), "-c", program, *names], capture_output=True, text=True, check=True
    )
    return dict(json.loads(asked.stdout))


def check_versions(found: Mapping[str, str], wanted: Wanted) -> None:
    """Exit if an existing environment contains another release than ``wanted``."""
    releases = {"torch": wanted.torch, "transformer-engine": wanted.transformer_engine}
    if wanted.checkout is None:
        releases["megatron-core"] = wanted.megatron_core
    for name, version in releases.items():
        if version and found.get(name, "none").partition("+")[0] != version:
            sys.exit(
                f"--environment: expected {name} {version} there, got {found.get(name, 'none')}. "
                "Remove it, or name another folder."
            )


def device() -> str:
    names = [gpu.name for gpu in find_gpus()]
    return ", ".join(names) or describe_cpu()


def describe_source(wanted: Wanted) -> str:
    """Return the source of megatron-core: the index, or a commit."""
    if wanted.checkout is None:
        return "wheel"
    asked = ["git", "-C", str(wanted.checkout), "log", "-1", "--format=%h of %cs"]
    said = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    return f"commit {said}" if said else "sources"


def record(path: Path, run: Mapping[str, Any]) -> None:
    """Add a run to the record, keeping files of the same versions that it did not run."""
    runs = json.loads(path.read_text())["runs"] if path.exists() else []
    what = ("versions", "source", "python", "device")
    others = [one for one in runs if any(one[key] != run[key] for key in what)]
    same = [one for one in runs if one not in others]
    files = {name: of_file for one in same for name, of_file in one["files"].items()}
    commands = [command for one in same for command in one["commands"]]
    merged = {
        **run,
        "commands": list(dict.fromkeys([*commands, *run["commands"]])),
        "files": dict(sorted({**files, **run["files"]}.items())),
    }
    runs = sorted([*others, merged], key=order)
    path.write_text(json.dumps({"runs": runs}, indent=1) + "\n")


def order(run: Mapping[str, Any]) -> list[str]:
    """Return the sort key of a run: its versions of the packages in :data:`KNOWN`."""
    return [run["versions"].get(name, "") for name in KNOWN]


def totals(files: Mapping[str, Mapping[str, Any]]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for of_file in files.values():
        counts.update({outcome: of_file[outcome] for outcome in ("passed", "failed", "skipped")})
    return counts


def failures(files: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for file, of_file in files.items():
        for case, reason in of_file["failures"].items():
            yield f"{file}::{case}: {reason}"


def run_there(python: Path, wanted: Wanted, tests: Sequence[str]) -> dict[str, Any]:
    numbers = installed(python)
    check_versions(numbers, wanted)
    # test the installed Megatron, not another one on the path
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    found = run_suite(python, tests, environment, gpus=bool(wanted.transformer_engine))
    return describe_run(numbers, describe_source(wanted), wanted.command(tests), found)


def run_here(tests: Sequence[str]) -> dict[str, Any]:
    found = run_suite(Path(sys.executable), tests, os.environ, gpus=bool(find_gpus()))
    numbers = {name: version for name in (*KNOWN, *BESIDE) if (version := find_version(name))}
    core = find_package("megatron-core")
    source = "sources" if core is not None and core.checkout else "wheel"
    named = [] if list(tests) == ALL else tests
    command = shlex.join(["python", "-m", "tools.upstream.versions", "--here", *named])
    if os.environ.get("TRANSFORMER_ENGINE_PATH"):
        command = f"TRANSFORMER_ENGINE_PATH=DIR {command}"
    return describe_run(numbers, source, command, found)


def describe_run(
    numbers: Mapping[str, str], source: str, command: str, found: Mapping[str, Outcomes]
) -> dict[str, Any]:
    return {
        "versions": numbers,
        "source": source,
        "python": platform.python_version(),
        "device": device(),
        **kernels(on_gpu=bool(find_gpus())),
        "commands": [command],
        "files": {name: asdict(of_file) for name, of_file in sorted(found.items())},
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.upstream.versions")
    parser.add_argument("--torch", default="2.11.0")
    parser.add_argument("--megatron-core", default="0.19.2", help="a release, or a checkout's path")
    parser.add_argument("--transformer-engine", help="builds it, and runs the tests that use GPUs")
    parser.add_argument("--environment", type=Path, help="is made there, kept, and used as it is")
    parser.add_argument("--here", action="store_true", help="installs nothing")
    parser.add_argument("--json", type=Path, default=RECORD)
    parser.add_argument("tests", nargs="*", metavar="TESTS", default=ALL)
    args = parser.parse_args(argv)
    if args.transformer_engine and not find_gpus():
        parser.error("--transformer-engine: expected a GPU, got none. Run it on a machine with one")
    others = ("torch", "megatron_core", "transformer_engine", "environment")
    given = [name for name in others if getattr(args, name) != parser.get_default(name)]
    if args.here and given:
        parser.error(f"--here: expected no --{given[0].replace('_', '-')} beside it. Leave one out")
    if args.here:
        run = run_here(args.tests)
    else:
        wanted = Wanted(
            torch=args.torch,
            megatron_core=args.megatron_core,
            transformer_engine=args.transformer_engine,
        )
        with tempfile.TemporaryDirectory(prefix="versions-") as temporary:
            folder = args.environment or Path(temporary) / "environment"
            run = run_there(make_environment(folder, wanted), wanted, args.tests)
    record(args.json, run)
    for line in failures(run["files"]):
        print(f"FAILED {line}")
    print(", ".join(f"{count} {outcome}" for outcome, count in totals(run["files"]).items()))
    return int(any(failures(run["files"])))


if __name__ == "__main__":
    sys.exit(main())
