"""What a resumed run takes over from the run before it, and what differs between the two."""

import argparse
import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

from moe_optim.commands.console.files import write_atomically
from moe_optim.commands.train.resume import newest_complete_checkpoint
from moe_optim.commands.train.run_folder import RunFolder
from moe_optim.config import MoEOptimConfig
from moe_optim.config.recipes import Recipe
from moe_optim.errors import ConfigError, StateError
from moe_optim.integration.argv import flags, options, without_options

OVERRIDE_SCHEDULE = "--override-opt_param-scheduler"
CKPT_STEP = "--ckpt-step"
_OF_ONE_LOAD = (
    CKPT_STEP,
    OVERRIDE_SCHEDULE,
    "--use-checkpoint-opt_param-scheduler",
    "--load",
    "--finetune",
    "--no-load-optim",
    "--no-load-rng",
)
"""Megatron's flags about a checkpoint that is loaded once."""
_COUNTED = ("--train", "--lr-decay", "--lr-warmup", "--lr-wsd-decay")
_UNITS = {"iters": "samples", "samples": "iters"}
"""Megatron counts all of a run in iterations, or all of it in samples."""
_SECTION = "megatron_args."
_RATES = ("--lr", "--min-lr", "--decoupled-lr", "--decoupled-min-lr")


@dataclass(frozen=True)
class Inheritance:
    """The arguments that a resumed run was started with before, as the run folder has them."""

    set: list[str]
    megatron_args: list[str]
    settings: dict[str, str]
    """Every flag and knob that was in force, with its value."""


@contextlib.contextmanager
def remembered(folder: RunFolder, args: argparse.Namespace, recipe: Recipe) -> Iterator[None]:
    """Record what a run is started with, for resumed ones to take over.

    What was recorded before comes back where the block has left no newer checkpoint.
    """
    before = folder.arguments.read_bytes() if folder.arguments.is_file() else None
    newest = newest_complete_checkpoint(folder.checkpoints)
    record = {
        "set": args.set,
        "megatron_args": without_options(args.megatron_args, _OF_ONE_LOAD),
        "settings": _settings(args, recipe),
    }
    write_atomically(folder.arguments, f"{json.dumps(record, indent=1)}\n".encode())
    try:
        yield
    finally:
        if before is not None and newest_complete_checkpoint(folder.checkpoints) == newest:
            write_atomically(folder.arguments, before)


def recall_arguments(folder: RunFolder) -> Inheritance | None:
    """Return what the run of a folder was started with; None where that was not recorded.

    Raises:
        StateError: the record is damaged.
    """
    if not folder.arguments.is_file():
        return None
    try:
        record = Inheritance(**json.loads(folder.arguments.read_text()))
        lists = [*record.set, *record.megatron_args, *record.settings, *record.settings.values()]
        if not all(isinstance(word, str) for word in lists):
            raise TypeError
    except (ValueError, TypeError) as error:
        raise StateError(
            f"{folder.arguments}: expected the arguments of the run, got something else. Remove "
            "the file, and give all arguments that the run was started with."
        ) from error
    return record


def inherit(args: argparse.Namespace, old: Inheritance) -> argparse.Namespace:
    """Return ``args`` with those that the run was started with; what is given anew wins."""
    assigned = {assignment.partition("=")[0] for assignment in args.set}
    given = set(flags(args.megatron_args))
    given |= {key.removeprefix(_SECTION) for key in assigned if key.startswith(_SECTION)}
    for flag in tuple(given):
        stem, _, unit = flag.rpartition("-")
        if stem in _COUNTED and unit in _UNITS:
            given |= {f"{one}-{_UNITS[unit]}" for one in _COUNTED}
        if stem == "--lr-warmup":  # one of the three
            given |= {f"{stem}-{one}" for one in (*_UNITS, "fraction")}
    kept = [one for one in old.set if one.partition("=")[0] not in assigned]
    changed = {
        "set": [*kept, *args.set],
        "megatron_args": [*without_options(old.megatron_args, given), *args.megatron_args],
    }
    return argparse.Namespace(**vars(args) | changed)


def name_differences(old: Inheritance, args: argparse.Namespace, recipe: Recipe) -> list[str]:
    """Return every flag and knob that is not as the run was started with, and both values."""
    now = _settings(args, recipe)
    return [
        f"{name}: {_spell(now.get(name))}, where the run had {_spell(old.settings.get(name))}"
        for name in _differing(old.settings, now)
    ]


def refuse_other_rates(old: Inheritance, args: argparse.Namespace, recipe: Recipe) -> None:
    """Refuse another learning rate that Megatron would not take from a command line.

    Raises:
        ConfigError: a rate differs, and nothing overrides the saved schedule; or Megatron's own
            optimizer is to load it, which finds its state by the rate.
    """
    now = _settings(args, recipe)
    changed = [name for name in _differing(old.settings, now) if name in _RATES]
    overrides = OVERRIDE_SCHEDULE in flags(args.megatron_args)
    if not changed or (overrides and not args.stock):
        return
    remedy = f"add {OVERRIDE_SCHEDULE}"
    if args.stock:
        remedy = "train without --stock: Megatron's own optimizer finds its state by the rate"
    raise ConfigError(
        f"{changed[0]}: expected {_spell(old.settings.get(changed[0]))}, as the run was started, "
        f"got {_spell(now.get(changed[0]))}. Leave it out to go on as before; to go on with "
        f"another, {remedy}."
    )


def _differing(old: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    names = dict.fromkeys((*now, *old))
    return [name for name in names if not _is_same(old.get(name), now.get(name))]


def _is_same(one: str | None, other: str | None) -> bool:
    try:
        return one == other or float(one or "") == float(other or "")
    except ValueError:
        return False


def _spell(value: str | None) -> str:
    return "it not" if value is None else value or "it"


def _settings(args: argparse.Namespace, recipe: Recipe) -> dict[str, str]:
    """Return flag or knob -> its value, as words; flags without one have none."""
    given: dict[str, str] = {"--stock": ""} if args.stock else {}
    for flag, words in options([*recipe.megatron_argv(), *args.megatron_args]):
        if flag not in _OF_ONE_LOAD:
            given[flag] = " ".join(words)
    return given | ({} if args.stock else dict(_knobs(recipe.moe_optim)))


def _knobs(config: MoEOptimConfig) -> Iterator[tuple[str, str]]:
    for field in fields(config):
        yield f"moe_optim.{field.name}", str(getattr(config, field.name))
