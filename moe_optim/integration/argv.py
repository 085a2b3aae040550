"""Functions that read and edit Megatron command lines."""

import argparse
import functools
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Literal

from moe_optim.config import FormatSetting
from moe_optim.rules import native_formats

DATA_FLAGS = (
    "--mock-data", "--data-path", "--data-args-path", "--train-data-path",
    "--per-split-data-args-path",
)  # fmt: skip
"""Megatron's flags that select the training data."""


def spell_format(format: FormatSetting, argv: Sequence[str]) -> str:
    """Return the weight format requested by ``format``, or if ``auto`` by Megatron's flags.

    For messages: checkpoint arguments or a YAML file may still override the flags in ``argv``, and
    a built model records its own format. Scales of FP8 blocks follow Transformer Engine's variable.
    """
    if format != "auto":
        return format
    given = flags(argv)
    for bits, default in (("fp8", "delayed"), ("fp4", "nvfp4")):  # Megatron's defaults
        if f"--{bits}-param-gather" in given:
            recipe = last_value(argv, f"--{bits}-recipe") or default
            return (*native_formats(f"--{bits}-recipe {recipe}"), format)[0]
    portable = last_value(argv, "--transformer-impl") == "local" and "--moe-grouped-gemm" in given
    return "mxfp8" if portable else "bf16"


def add_recipe(
    parser: argparse.ArgumentParser, example: str, *, nargs: Literal["?"] | None = None
) -> None:
    """Add RECIPE, optional with ``nargs``, and ``megatron_args`` for arguments after ``--``."""
    text = f"a YAML file, or a name that `moe-optim recipes` lists, such as {example}"
    parser.add_argument("recipe", type=Path, nargs=nargs, metavar="RECIPE", help=text)
    parser.set_defaults(megatron_args=[])
    keep_arguments_after_dashes(parser)


def add_changes(parser: argparse.ArgumentParser, example: str) -> None:
    """Add ``--set``, which overrides fields of a recipe."""
    text = f"change the recipe, such as {example}"
    words: Any = {"action": "extend", "nargs": "+", "default": [], "metavar": "KEY=VALUE"}
    parser.add_argument("--set", **words, help=text)


def keep_arguments_after_dashes(parser: argparse.ArgumentParser) -> None:
    """Store arguments after ``--`` in ``megatron_args``, and refuse unknown ones before it.

    Before Python 3.13, argparse passes them on only in some places.
    """
    parse = parser.parse_known_args

    @functools.wraps(parse)
    def parse_known_args(
        args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        words = list(sys.argv[1:] if args is None else args)
        end = words.index("--") if "--" in words else len(words)
        parsed, unknown = parse(words[:end], namespace)
        if unknown:
            listed = " ".join(unknown)
            parser.error(f"unrecognized arguments: {listed}. Arguments for Megatron go after --")
        rest = words[end + 1 :]
        parsed.megatron_args = rest[:-1] if rest[-1:] == ["--"] else rest  # ends an empty list
        return parsed, unknown

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign, assignment]


def flags(argv: Sequence[str]) -> list[str]:
    """Return the flags of ``argv`` without their values."""
    return [word.partition("=")[0] for word in argv if word.startswith("--")]


def without_options(argv: Sequence[str], names: Collection[str]) -> list[str]:
    """Return ``argv`` without the flags in ``names`` and the words up to the next flag."""
    kept: list[str] = []
    is_kept = True
    for word in argv:
        if word.startswith("--"):
            is_kept = word.partition("=")[0] not in names
        kept += [word] * is_kept
    return kept


def data_flags(argv: Sequence[str]) -> list[str]:
    """Return the flags of ``argv`` that select the training data."""
    return [flag for flag in flags(argv) if flag in DATA_FLAGS]


def last_value(argv: Sequence[str], flag: str) -> str | None:
    """Return the last value of ``flag``, which argparse uses."""
    value = None
    for word, following in zip(argv, [*argv[1:], ""], strict=True):
        name, equals, joined = word.partition("=")
        if name == flag:
            value = joined if equals else following
    return value
