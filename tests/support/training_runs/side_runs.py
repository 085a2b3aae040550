"""Training runs in processes of their own, several at a time on one machine, stock or plug-in."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from moe_optim.config.recipes import Value, load_recipe
from tests.support.gpu_sharing import places
from tests.support.training_runs.observed_run import Report

ROOT = Path(__file__).parents[3]
RECIPE = ROOT / "recipes" / "hopper_fp8_block.yaml"
EAGER = {"TORCHDYNAMO_DISABLE": "1", "NVTE_TORCH_COMPILE": "0"}
"""Small functions are run as written: compiling them takes longer than all of a run."""

Flags = Mapping[str, Value]


@dataclass(frozen=True)
class Run:
    """One training run.

    Args:
        flags: over those of the recipe; false takes one away.
        plugin: what ``--moe-optim-set`` assigns; None trains with stock Megatron.
        ranks: processes, each with a GPU of its own.
        switches: see :mod:`tests.support.training_runs.observed_run`.
        environment: over the machine's.
    """

    flags: Flags
    plugin: tuple[str, ...] | None = None
    ranks: int = 1
    switches: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def argv(self) -> list[str]:
        """Return Megatron's and the plug-in's flags."""
        changes = [f"megatron_args.{flag}={json.dumps(v)}" for flag, v in self.flags.items()]
        argv = load_recipe(RECIPE, changes).megatron_argv()
        if self.plugin is not None:
            argv.append("--use-moe-grouped-optim")
            for assignment in self.plugin:
                argv += ["--moe-optim-set", assignment]
        return argv


@dataclass(frozen=True)
class Machine:
    """Where runs go, and what they may cost.

    Args:
        folder: gets a folder for each run, with reports and logs.
        at_a_time: runs.
        timeout_s: of one run.
        environment: of every rank, over this process's.
    """

    folder: Path
    at_a_time: int
    timeout_s: float = 150
    environment: Mapping[str, str] = field(default_factory=dict)

    def train(self, runs: Mapping[str, Run]) -> dict[str, list[Report]]:
        """Return the reports of all ranks of every run, by its name."""
        with ThreadPoolExecutor(self.at_a_time) as pool:
            done = pool.map(lambda item: self._train(*item), runs.items())
            return dict(zip(runs, done, strict=True))

    def _train(self, name: str, run: Run) -> list[Report]:
        folder = self.folder / name.replace(" ", "-").replace(",", "")
        folder.mkdir(parents=True)
        with places(run.ranks):
            # served here, on a port that nobody else can take before the ranks come
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            ranks = [self._start(run, rank, store.port, folder) for rank in range(run.ranks)]
            return [self._finish(rank, folder / f"{i}.json") for i, rank in enumerate(ranks)]

    def _start(self, run: Run, rank: int, port: int, folder: Path) -> "subprocess.Popen[bytes]":
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(run.ranks),
            "LOCAL_WORLD_SIZE": str(run.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.getenv("PYTHONPATH")])]),
        }
        report = folder / f"{rank}.json"
        module = "tests.support.training_runs.observed_run"
        command = [sys.executable, "-m", module, str(report), *run.switches]
        with (folder / f"{rank}.log").open("wb") as log:
            return subprocess.Popen(
                [*command, "--", *run.argv()],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=os.environ | environment | self.environment | run.environment,
                start_new_session=True,
            )

    def _finish(self, rank: "subprocess.Popen[bytes]", report: Path) -> Report:
        try:
            code: int | str = rank.wait(self.timeout_s)
        except subprocess.TimeoutExpired:
            code = f"none after {self.timeout_s:g} s"
        with contextlib.suppress(ProcessLookupError):  # also what it started and left behind
            os.killpg(rank.pid, signal.SIGKILL)
        rank.wait()
        if not report.exists():
            return Report(error=f"no report; exit code {code}")
        return Report(**json.loads(report.read_text()))


def missing_settings(wanted: Mapping[str, Any], reports: Iterable[Report]) -> dict[str, Any]:
    """Return what of ``wanted`` some rank's configuration says otherwise, with what it says."""
    return {
        name: report.settings.get(name)
        for report in reports
        for name, value in wanted.items()
        if report.settings.get(name) != value
    }
