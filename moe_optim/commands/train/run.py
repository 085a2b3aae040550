"""One use of ``moe-optim train``: everything from the text on the disk to the summary."""

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from moe_optim.checkpoint.files.folders import iteration_folders
from moe_optim.checkpoint.integrity import is_damage, step_beside
from moe_optim.commands.console.checkpoint_progress import progress_bar
from moe_optim.commands.console.files import free_bytes, full_disk_explained, full_disk_sentence
from moe_optim.commands.train.byte_dataset import (
    ByteDataset,
    dataset_argv,
    prepare_dataset,
    require_sequence_length,
)
from moe_optim.commands.train.inheritance import (
    CKPT_STEP,
    OVERRIDE_SCHEDULE,
    inherit,
    name_differences,
    recall_arguments,
    refuse_other_rates,
    remembered,
)
from moe_optim.commands.train.resume import find_resume_point, newest_complete_checkpoint
from moe_optim.commands.train.run_folder import (
    RunFolder,
    claim,
    recall_text,
    remember_text,
    require_megatron_data,
    spell_text,
)
from moe_optim.commands.train.summary import LaunchFacts, print_summary, write_summary
from moe_optim.commands.train.text_files import find_text, standard_library_text
from moe_optim.config.recipes import Recipe, check_requirements, load_recipe
from moe_optim.errors import ConfigError, raise_faults
from moe_optim.integration.argv import data_flags, flags, last_value, spell_format, without
from moe_optim.screen import fail, results_console

if TYPE_CHECKING:
    from moe_optim.commands.train.launcher import LaunchResult, RankFailure
    from moe_optim.commands.train.progress import TrainingState

# What imports torch is imported where it is needed, with the first lines on the screen: it takes
# seconds.

RANK_ENTRY: tuple[str, ...] = (sys.executable, "-m", "moe_optim.commands.train.pretrain")
"""Command of one rank, without its arguments."""
PREFLIGHT: tuple[str, ...] = (sys.executable, "-m", "moe_optim.commands.train.preflight")
"""Command that checks the arguments of a rank."""

_FOLDER_FLAGS = ("--save", "--tensorboard-dir", "--data-cache-path")
_CPU_DEFAULTS = ("--num-workers", "0")  # loader processes would take the cores from the ranks
_NOTHING_FREE_BYTES = 2**20  # the disk is full, though the ranks could not even write it down
_LITTLE_FREE_BYTES = 2**26  # the disk is full if a rank said so; else another one may be
_REFUSED = 2  # of a rank: argparse, or an error of ours


def train(args: argparse.Namespace) -> int:
    """Train, and return the exit code: 0 done, 1 failed, 128 + n stopped by signal n.

    Raises:
        MoEOptimError: the recipe, the run folder or the text cannot be used.
        OSError: a file cannot be written.
    """
    recipe = load_recipe(args.recipe, args.set)
    check_requirements(recipe)
    _check_arguments(args, recipe)
    out = args.out or Path("runs") / args.recipe.stem
    with claim(out, resume=args.resume) as folder:
        notes: list[str] = []
        if args.resume and (old := recall_arguments(folder)):
            args = inherit(args, old)
            recipe = load_recipe(args.recipe, args.set)
            _check_arguments(args, recipe)
            refuse_other_rates(old, args, recipe)
            notes = name_differences(old, args, recipe)
        return _Training(args, recipe, folder, results_console(), notes).run()


def _check_arguments(args: argparse.Namespace, recipe: Recipe) -> None:
    """Refuse Megatron flags that would pull the run folder or the dataset apart."""
    if args.stock and (changed := _changed_fields(args.set)):
        raise ConfigError(
            f"--set moe_optim.{changed[0]}: expected no knobs of the plug-in with --stock, which "
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
            "--yaml-cfg: expected flags, got a file in whose place Megatron drops them all, the "
            "run folder's among them. Write its settings as megatron_args, or give the file to a "
            "script that `moe-optim run` runs."
        )
    if args.resume and "--load" in given:
        raise ConfigError("--load: --resume loads from the run folder itself. Drop one of the two.")
    if args.text and (data := data_flags(given)):
        raise ConfigError(f"--text and {data[0]} both say what to train on. Drop one of the two.")


def _changed_fields(assignments: Sequence[str]) -> list[str]:
    """Return the fields of ``moe_optim`` that ``--set`` names."""
    keys = [assignment.partition("=")[0] for assignment in assignments]
    return [key.removeprefix("moe_optim.") for key in keys if key.startswith("moe_optim.")]


@dataclass(frozen=True)
class _Training:
    """One use of the command: what was asked for, and where it goes."""

    args: argparse.Namespace
    recipe: Recipe
    folder: RunFolder
    console: Console
    differences: Sequence[str]
    """What is not as the run was started with that is resumed."""

    def run(self) -> int:
        """Do everything in order."""
        weights = "Megatron's own optimizer"
        if not self.args.stock:
            format = spell_format(self.recipe.moe_optim.format, self.megatron_argv)
            weights = f"{format} expert weights"
        self._say(f"{self.recipe.path}: {weights}, run folder {self.folder.path}")
        for difference in self.differences:
            self._say(f"resume: {difference}")
        cpu = self._use_cpu()
        self._check_flags(cpu)
        resumed_from = self._resume_point() if self.args.resume else None
        dataset = self._prepare_dataset()
        with remembered(self.folder, self.args, self.recipe):
            result = self._launch(dataset, cpu)
        if result.stopped_by is not None:
            return self._report_stop(result.stopped_by)
        if result.failure is not None:
            return self._report_failure(result.failure, result.state)
        facts = LaunchFacts(
            world_size=self.ranks,
            seconds=result.seconds,
            command=self._command(self.args.megatron_args, resume=self.args.resume),
            resumed_from=resumed_from,
            byte_entropy=dataset.byte_entropy if dataset else None,
            test_loss=result.state.test_loss,
        )
        summary = write_summary(self.folder, facts)
        if result.state.total == 0:
            self._say("nothing was left to train: ask for more with `-- --train-iters N`")
        samples = last_value(self.megatron_argv, "--train-samples")
        iterations = ("--train-iters", str(2 * summary["iterations"]))
        if samples is not None:  # Megatron takes one of the two
            iterations = ("--train-samples", str(2 * int(samples)))
        # A longer schedule is not the one in the checkpoint.
        longer = self._resume_command(*iterations, OVERRIDE_SCHEDULE, replaced=iterations[:1])
        print_summary(summary, self.folder, longer, self.console)
        return 0

    @property
    def ranks(self) -> int:
        """Processes to start."""
        return self.args.ranks or self.recipe.ranks

    @property
    def megatron_argv(self) -> list[str]:
        """The recipe's flags and the user's own, which win."""
        return [*self.recipe.megatron_argv(), *self.args.megatron_args]

    def _say(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False)

    def _resume_point(self) -> int:
        step = last_value(self.megatron_argv, CKPT_STEP)
        if step is not None and step.isdigit():
            self._say(f"resume: from the checkpoint of iteration {step}, as {CKPT_STEP} says")
            return int(step)
        point = find_resume_point(self.folder.checkpoints)
        for note in point.notes:
            self._say(f"resume: {note}")
        self._say(f"resume: from the checkpoint of iteration {point.iteration}")
        return point.iteration

    def _prepare_dataset(self) -> ByteDataset | None:
        """Build or find the dataset; None where Megatron's flags name another one."""
        if data := data_flags(self.megatron_argv):
            if self.args.resume:
                require_megatron_data(self.folder, data[0])
            remember_text(self.folder, None)
            return None
        paths = self._text()
        files = find_text(paths) if paths else standard_library_text()
        size = sum(file.size for file in files)
        self._say(f"dataset: {len(files)} files, {size / 1e6:.1f} MB")
        root = self.folder.path.resolve().parent / "data"
        doing = "building the dataset"
        with full_disk_explained(root, doing), progress_bar(doing, size) as report:
            dataset, built = prepare_dataset(files, root, on_bytes=report)
        counts = ", ".join(f"{count:,} {split}" for split, count in dataset.bytes.items())
        self._say(
            f"dataset: {'built' if built else 'reused'} {dataset.folder} ({counts} bytes; "
            f"byte entropy {dataset.byte_entropy:z.3f} nats/byte)"
        )
        length = last_value(self.megatron_argv, "--seq-length")
        if length is not None and length.isdigit():
            require_sequence_length(dataset, int(length))
        remember_text(self.folder, paths)
        return dataset

    def _text(self) -> list[Path]:
        """Return the files and folders to train on; none for the standard library."""
        given: list[Path] = self.args.text
        if not self.args.resume:
            return given
        paths = recall_text(self.folder, given)
        self._say(f"resume: on {spell_text(paths)}")
        return paths

    def _check_flags(self, cpu: bool) -> None:
        """Refuse flags that no rank could start with, all of them at once."""
        from moe_optim.commands.train.launcher import LaunchPlan, rank_environments

        plan = LaunchPlan(
            entry=(*PREFLIGHT, *self._rank_arguments(None, cpu)),
            ranks=self.ranks,
            logs=self.folder.path,
            cpu=cpu,
        )
        with self.console.status("checking flags"):
            done = subprocess.run(
                plan.entry,
                env=os.environ | rank_environments(plan, port=0)[0],  # it meets nobody
                capture_output=True,
                text=True,
                check=False,
            )
        if done.returncode == 0:  # else it is broken itself, and the ranks are to say why
            raise_faults(f"{self.recipe.path} and flags after --", json.loads(done.stdout))

    def _launch(self, dataset: ByteDataset | None, cpu: bool) -> "LaunchResult":
        from moe_optim.commands.train.launcher import LaunchPlan, launch

        plan = LaunchPlan(
            entry=(*RANK_ENTRY, *self._rank_arguments(dataset, cpu)),
            ranks=self.ranks,
            logs=self.folder.next_log_folder(),
            cpu=cpu,
        )
        shutil.rmtree(self.folder.index_cache, ignore_errors=True)  # may be cut off: a full disk
        with full_disk_explained(self.folder.path, "starting the ranks"):
            return launch(plan, self.console)

    def _use_cpu(self) -> bool:
        import torch

        gpus = torch.cuda.device_count()  # through NVML: no context on the ranks' GPUs
        if self.args.cpu or gpus == 0:
            return True
        if self.ranks > gpus:
            raise ConfigError(
                f"ranks: expected at most one a GPU, got {self.ranks} for {gpus} GPUs. "
                "Use --ranks, or --cpu."
            )
        return False

    def _rank_arguments(self, dataset: ByteDataset | None, cpu: bool) -> list[str]:
        """Return what every rank is called with; the user's own flags come last and win."""
        folder = RunFolder(self.folder.path.resolve())
        argv = [*_CPU_DEFAULTS] if cpu else []
        argv += self.recipe.megatron_argv()
        argv += ["--save", str(folder.checkpoints)]
        argv += ["--tensorboard-dir", str(folder.tensorboard), "--tensorboard-log-interval", "1"]
        argv += ["--log-timers-to-tensorboard", *([] if cpu else ["--log-memory-to-tensorboard"])]
        if dataset is not None:
            argv += dataset_argv(dataset, folder.index_cache)
        if self.args.resume:
            argv += ["--load", str(folder.checkpoints), "--exit-on-missing-checkpoint"]
        argv += [] if self.args.stock else self._plugin_arguments()
        return [*argv, *self.args.megatron_args]

    def _plugin_arguments(self) -> list[str]:
        argv = ["--use-moe-grouped-optim", "--moe-optim-recipe", str(self.recipe.path.resolve())]
        for field in _changed_fields(self.args.set):
            value = json.dumps(getattr(self.recipe.moe_optim, field))  # JSON is YAML too
            argv += ["--moe-optim-set", f"{field}={value}"]
        return argv

    def _report_failure(self, failure: "RankFailure", state: "TrainingState") -> int:
        sentence = failure.sentence()
        free = free_bytes(self.folder.path)
        if free < (_LITTLE_FREE_BYTES if failure.disk_full else _NOTHING_FREE_BYTES):
            sentence = full_disk_sentence(self.folder.path, f"rank {failure.rank}")
        lines = [sentence, f"Log: {failure.log}"]
        if is_damage(failure.reason):
            step = step_beside(failure.reason)
            way_on = [] if step is None else [self._continue_from(step, CKPT_STEP, str(step))]
            return fail("\n  ".join([*lines, *way_on]))
        if "OptimizerParamScheduler" in failure.reason:
            lines.append(f"{OVERRIDE_SCHEDULE} takes another schedule than the checkpoint's.")
            return fail("\n  ".join([*lines, self._what_next(OVERRIDE_SCHEDULE)]))
        said_why = failure.exit_code > 0 and failure.reason and not failure.disk_full
        if failure.exit_code == _REFUSED or (said_why and state.iteration == 0):
            return fail("\n  ".join([*lines, self._once_changed()]))  # it would fail again
        return fail("\n  ".join([*lines, self._what_next()]))

    def _report_stop(self, number: signal.Signals) -> int:
        self._say(f"stopped by {number.name}; no rank is left. {self._what_next()}")
        return 128 + number

    def _what_next(self, *remedy: str) -> str:
        """Say which checkpoint can be resumed, and how; ``remedy`` are flags for Megatron."""
        iteration = newest_complete_checkpoint(self.folder.checkpoints)
        if iteration is not None:
            return self._continue_from(iteration, *remedy)
        if iteration_folders(self.folder.checkpoints):
            return "No checkpoint is complete: start again in another folder with --out."
        again = self._command(self.args.megatron_args, resume=False)
        return f"There is no checkpoint yet: start again: {again}"

    def _once_changed(self) -> str:
        """Say from where a run goes on that has refused something, without a command."""
        iteration = newest_complete_checkpoint(self.folder.checkpoints)
        if iteration is None:
            return "There is no checkpoint yet: start again once that is changed."
        return f"Continue from iteration {iteration} with --resume once that is changed."

    def _continue_from(self, iteration: int, *remedy: str) -> str:
        return f"Continue from iteration {iteration}: {self._resume_command(*remedy)}"

    def _resume_command(self, *more: str, replaced: Collection[str] = ()) -> str:
        """Return the command that goes on with this run, from its newest checkpoint.

        ``more`` are flags for Megatron, ``replaced`` those of one value that they give anew.
        """
        old = without(
            self.args.megatron_args,
            valued=(CKPT_STEP, *replaced),
            bare={OVERRIDE_SCHEDULE}.intersection(more),
        )
        return self._command([*old, *more], resume=True)

    def _command(self, megatron_args: Sequence[str], *, resume: bool) -> str:
        """Return the command line of this run with other flags for Megatron, for a shell."""
        args = self.args
        words = ["moe-optim", "train", str(args.recipe)]
        words += ["--out", str(args.out)] if args.out else []
        words += ["--set", *args.set] if args.set else []
        words += ["--text", *map(str, args.text)] if args.text else []
        words += ["--ranks", str(args.ranks)] if args.ranks else []
        words += ["--cpu"] if args.cpu else []
        words += ["--stock"] if args.stock else []
        words += ["--resume"] if resume else []
        words += ["--", *megatron_args] if megatron_args else []
        return shlex.join(words)
