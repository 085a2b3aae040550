"""The whole of ``moe-optim train``, from the text on disk to the summary."""

import argparse
import itertools
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console

from moe_optim.checkpoint.files.untrusted_files import parse_json
from moe_optim.commands.console.files import write_atomically
from moe_optim.commands.train.dataset import (
    ByteDataset,
    build_dataset,
    find_text,
    load_dataset,
    require_text_paths,
    standard_library_text,
)
from moe_optim.commands.train.early_check import list_early_faults
from moe_optim.commands.train.run_folder import (
    RunFolder,
    claim,
    find_resume_point,
    newest_complete_checkpoint,
)
from moe_optim.commands.train.summary import print_summary, write_summary
from moe_optim.config.recipes import Recipe, check_requirements, load_recipe
from moe_optim.errors import ConfigError, StateError, raise_faults
from moe_optim.formats import FORMATS
from moe_optim.integration.argv import (
    data_flags,
    flags,
    last_value,
    spell_format,
    without_options,
)
from moe_optim.screen import fail, results_console

if TYPE_CHECKING:
    from moe_optim.commands.train.launcher import LaunchResult, RankFailure

# Modules that import torch, which takes seconds, are imported after the first output.

RANK_MODULE = "moe_optim.commands.train.pretrain"
_FOLDER_FLAGS = ("--save", "--tensorboard-dir", "--data-cache-path")
_CPU_DEFAULTS = ("--num-workers", "0")  # loader processes would compete with the ranks for cores
_LITTLE_FREE_BYTES = 2**26
_OVERRIDE, _CKPT_STEP = "--override-opt_param-scheduler", "--ckpt-step"
_OF_ONE_LOAD = (
    *(_OVERRIDE, _CKPT_STEP, "--use-checkpoint-opt_param-scheduler", "--load"),
    *("--finetune", "--no-load-optim", "--no-load-rng"),
)
"""Megatron flags for a single load of a checkpoint, which a resumed run does not inherit."""


def train(args: argparse.Namespace) -> int:
    """Train, and return the exit code: 0 success, 1 failure, 128 + n stopped by signal n."""
    recipe = load_recipe(args.recipe, args.set)
    check_requirements(recipe)
    _check_arguments(args, recipe)
    with claim(args.out or Path("runs") / args.recipe.stem, resume=args.resume) as folder:
        if args.resume and folder.arguments.is_file():
            args = _inherit(args, folder.arguments)
            recipe = load_recipe(args.recipe, args.set)
            _check_arguments(args, recipe)
        return _Training(args, recipe, folder, results_console()).run()


def _check_arguments(args: argparse.Namespace, recipe: Recipe) -> None:
    """Refuse Megatron flags that would move parts of the run folder or the dataset."""
    if args.stock and (changed := _changed_fields(args.set)):
        raise ConfigError(
            f"--set moe_optim.{changed[0]}: expected no config of the plug-in with --stock, which "
            "trains without it. Drop one of the two."
        )
    if args.ranks is not None and args.ranks < 1:
        raise ConfigError(f"--ranks: expected 1 or more, got {args.ranks}.")
    given = flags([*recipe.megatron_argv(), *args.megatron_args])
    for flag in _FOLDER_FLAGS:
        if flag in given:
            raise ConfigError(f"{flag}: the run folder decides where it goes. Use --out instead.")
    if "--yaml-cfg" in given:
        raise ConfigError(
            "--yaml-cfg: expected flags, got a file that replaces all of them, the run folder's "
            "too. Write its settings as megatron_args, or give the file to a script that "
            "`moe-optim run` runs."
        )
    if args.resume and "--load" in given:
        raise ConfigError("--load: --resume loads from the run folder itself. Drop one of the two.")
    if args.text and (data := data_flags(given)):
        raise ConfigError(f"--text and {data[0]} both set the training data. Drop one of the two.")
    require_text_paths(args.text)


def _inherit(args: argparse.Namespace, path: Path) -> argparse.Namespace:
    """Return ``args`` behind the recorded ones, which they override."""
    given = {*flags(args.megatron_args)}
    for unit, other in (("iters", "samples"), ("samples", "iters")):
        if f"--train-{unit}" in given:  # Megatron counts a whole run in one unit
            given |= {f"--{one}-{other}" for one in ("train", "lr-decay", "lr-warmup")}
    try:
        record = parse_json(path.read_bytes())
        changes, words = ([str(one) for one in record[key]] for key in ("set", "megatron_args"))
    except (ValueError, TypeError, KeyError) as error:
        raise StateError(
            f"{path}: expected the options of the run, got something else: {error}. Remove the "
            "file, and give all options that the run was started with."
        ) from error
    keys = {one.partition("=")[0].removeprefix("megatron_args.") for one in args.set}
    words = [*without_options(words, given | keys), *args.megatron_args]
    return argparse.Namespace(**vars(args) | {"set": [*changes, *args.set], "megatron_args": words})


def _changed_fields(assignments: Sequence[str]) -> list[str]:
    keys = [assignment.partition("=")[0] for assignment in assignments]
    return [key.removeprefix("moe_optim.") for key in keys if key.startswith("moe_optim.")]


class _Training(NamedTuple):
    """Arguments and output folder of one training command."""

    args: argparse.Namespace
    recipe: Recipe
    folder: RunFolder
    console: Console

    def run(self) -> int:
        """Run every stage in order."""
        weights = "Megatron's own optimizer"
        if not self.args.stock:
            format = spell_format(self.recipe.moe_optim.format, self.megatron_argv)
            weights = f"{format} expert weights"
        self._say(f"{self.recipe.path}: {weights}, run folder {self.folder.path}")
        cpu = self._check_flags()
        resumed_from = self._resume_point() if self.args.resume else None
        dataset = self._prepare_dataset()
        began = time.monotonic()
        result = self._launch(dataset, cpu)
        if result.stopped_by is not None:
            stopped = f"stopped by {result.stopped_by.name}; all ranks have ended. {self._way_on()}"
            self.console.print(stopped, markup=False, highlight=False)
            return 128 + result.stopped_by
        if result.failure is not None:
            return self._report_failure(result.failure)
        summary = write_summary(
            self.folder,
            world_size=self.ranks,
            seconds=time.monotonic() - began,
            command=shlex.join(["moe-optim", *self.args.argv]),
            resumed_from=resumed_from,
            byte_entropy=dataset.byte_entropy if dataset else None,
            last_log=result.logs / str(self.ranks - 1) / "stdout.log",
        )
        print_summary(summary, self.folder, self._longer(summary["iterations"]), self.console)
        for line in self._uses(summary["format"], summary["iterations"]):
            self._say(line)
        return 0

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return self.args.ranks or self.recipe.ranks

    @property
    def megatron_argv(self) -> list[str]:
        """The recipe's flags, then the user's, which override them."""
        return [*self.recipe.megatron_argv(), *self.args.megatron_args]

    def _say(self, line: str) -> None:
        if not self.args.quiet:
            self.console.print(line, markup=False, highlight=False)

    def _check_flags(self) -> bool:
        """Refuse flags with which no rank could start, listing all; return whether CPUs train."""
        argv = self._rank_arguments(None, cpu=True)
        where = f"{self.recipe.path} and flags after --"
        raise_faults(where, list_early_faults(argv))
        environment = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(self.ranks)}
        done = subprocess.run(
            [sys.executable, "-m", RANK_MODULE, "--check", *argv],
            env=environment | ({"MOE_OPTIM_CPU": "1"} if self.args.cpu else {}),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:  # the check itself failed: the ranks will report why
            from moe_optim.integration.script_runner import trains_on_cpu

            return self.args.cpu or trains_on_cpu()
        report = json.loads(done.stdout)
        raise_faults(where, report["faults"])
        return bool(report["cpu"])

    def _resume_point(self) -> int:
        step = last_value(self.megatron_argv, _CKPT_STEP) or ""
        if step.isdigit():
            self._say(f"resume: from the checkpoint of iteration {step}, as given by {_CKPT_STEP}")
            return int(step)
        point = find_resume_point(self.folder.checkpoints)
        for note in (*point.notes, f"from the checkpoint of iteration {point.iteration}"):
            self._say(f"resume: {note}")
        return point.iteration

    def _prepare_dataset(self) -> ByteDataset | None:
        """Build the dataset, or load that of a resumed run; None if Megatron's flags name data."""
        args, folder = self.args, self.folder.dataset.resolve()
        data = data_flags(self.megatron_argv)
        dataset = load_dataset(folder) if args.resume else None
        if args.resume and (args.text or (dataset is None) != bool(data)):
            began = f"Python's library or --text, in {folder}" if dataset else "Megatron's data"
            raise ConfigError(
                f"--resume: expected the data that the run began with, {began}, got "
                f"{' '.join(data) or '--text or none'}. Leave --text out, and repeat Megatron's "
                "flags of data; or start a new run with --out."
            )
        if data:
            return None
        if dataset is None:
            files = find_text(args.text) if args.text else standard_library_text()
            size = sum(file.size for file in files)
            self._say(f"dataset: {len(files)} file{'s' * (len(files) != 1)}, {size / 1e6:.1f} MB")
            dataset = build_dataset(files, folder)
        counts = ", ".join(f"{count:,} {split}" for split, count in dataset.bytes.items())
        self._say(f"dataset: {counts} bytes; byte entropy {dataset.byte_entropy:z.3f} nats/byte")
        length = last_value(self.megatron_argv, "--seq-length") or ""
        if length.isdigit():
            dataset.require_sequence_length(int(length))
        return dataset

    def _launch(self, dataset: ByteDataset | None, cpu: bool) -> "LaunchResult":
        from moe_optim.commands.train.launcher import launch, rank_environment

        if not self.args.resume:
            self._record()
        before = newest_complete_checkpoint(self.folder.checkpoints)
        # the index may be truncated after a full disk
        shutil.rmtree(self.folder.index_cache, ignore_errors=True)
        result = launch(
            [sys.executable, "-m", RANK_MODULE, *self._rank_arguments(dataset, cpu)],
            ranks=self.ranks,
            logs=self.folder.logs,
            environment=rank_environment(self.ranks, cpu=cpu),
            is_shown=not self.args.quiet,
        )
        if newest_complete_checkpoint(self.folder.checkpoints) != before:
            self._record()
        return result

    def _record(self) -> None:
        """Record the options for a resumed run to inherit."""
        words = without_options(self.args.megatron_args, _OF_ONE_LOAD)
        record = {"set": self.args.set, "megatron_args": words}
        write_atomically(self.folder.arguments, f"{json.dumps(record, indent=1)}\n".encode())

    def _rank_arguments(self, dataset: ByteDataset | None, cpu: bool) -> list[str]:
        """Return the command line of every rank; the user's flags come last and override."""
        folder = RunFolder(self.folder.path.resolve())
        argv = [*_CPU_DEFAULTS] if cpu else []
        argv += self.recipe.megatron_argv()
        argv += ["--save", str(folder.checkpoints)]
        argv += ["--tensorboard-dir", str(folder.tensorboard), "--tensorboard-log-interval", "1"]
        argv += ["--log-timers-to-tensorboard", *([] if cpu else ["--log-memory-to-tensorboard"])]
        if dataset is not None:
            argv += dataset.megatron_argv(folder.index_cache)
        if self.args.resume:
            argv += ["--load", str(folder.checkpoints), "--exit-on-missing-checkpoint"]
        if not self.args.stock:
            recipe = str(self.recipe.path.resolve())
            argv += ["--use-moe-grouped-optim", "--moe-optim-recipe", recipe]
            for field in _changed_fields(self.args.set):
                value = json.dumps(getattr(self.recipe.moe_optim, field))  # JSON is YAML too
                argv += ["--moe-optim-set", f"{field}={value}"]
        return [*argv, *self.args.megatron_args]

    def _report_failure(self, failure: "RankFailure") -> int:
        lines = [failure.sentence(), f"Logs: {failure.logs}"]
        if (free := shutil.disk_usage(self.folder.path).free) < _LITTLE_FREE_BYTES:
            lines.append(f"The disk is almost full: {free / 2**20:.1f} MiB are free.")
        if "OptimizerParamScheduler" in failure.reason:
            lines.append(f"{_OVERRIDE} overrides the schedule of the checkpoint.")
        return fail("\n  ".join([*lines, self._way_on()]))

    def _way_on(self) -> str:
        iteration = newest_complete_checkpoint(self.folder.checkpoints)
        if iteration is None:
            return "There is no complete checkpoint: start again, without --resume."
        return f"Continue from iteration {iteration}: {self._resume_command()}"

    def _longer(self, iterations: int) -> str:
        """Return the command that trains twice as long, with a new learning-rate schedule."""
        samples = last_value(self.megatron_argv, "--train-samples")
        length = ["--train-iters", str(2 * iterations)]
        if samples is not None:  # Megatron takes one of the two
            length = ["--train-samples", str(2 * int(samples))]
        return f"{self._resume_command()} -- {shlex.join([*length, _OVERRIDE])}"

    def _new(self, name: str, iterations: int) -> str:
        """Return a folder of the run that does not exist, such as ``hf``, ``hf-640``, ``hf-640-2``.

        A resumed run may have left some of them.
        """
        numbered = f"{name}-{iterations}"
        names = itertools.chain((name, numbered), (f"{numbered}-{n}" for n in itertools.count(2)))
        return str(next(path for one in names if not (path := self.folder.path / one).exists()))

    def _uses(self, format: str, iterations: int) -> list[str]:
        """Return commands that use the run; conversions only for models with names elsewhere."""
        run = str(self.folder.path)
        commands = [["report", run]]
        if "--qk-layernorm" in flags(self.megatron_argv):  # the layers of Qwen3
            kept = format if format in FORMATS else "mxfp8"
            commands.append(["convert", "--to", "hf", run, self._new("hf", iterations)])
            commands.append(["export", "--format", kept, run, self._new(kept, iterations)])
        return [shlex.join(["moe-optim", *words]) for words in commands]

    def _resume_command(self) -> str:
        """Return the command that resumes this run, which inherits --set and flags."""
        args = self.args
        words = ["moe-optim", "train", str(args.recipe)]
        for option, value in (("--out", args.out), ("--ranks", args.ranks)):
            words += [option, str(value)] if value else []
        words += [f"--{name}" for name in ("cpu", "stock") if getattr(args, name)]
        return shlex.join([*words, "--resume"])
