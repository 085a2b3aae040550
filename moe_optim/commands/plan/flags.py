"""Megatron's flags, read as its own parser reads them, without importing it.

Importing it would take most of the time that a plan needs. ``megatron_flags.json`` lists the flags
of the versions of megatron-core that it names: numbers of values, types, choices and defaults.
Where another version is installed, or something is wrong with the flags, Megatron's own parser is
asked.
"""

import argparse
import ast
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from moe_optim.commands.hugging_face.values import MOST_LAYERS
from moe_optim.environment import Package, find_package
from moe_optim.errors import ConfigError
from moe_optim.integration.arguments import FlagsParser, parse_with_megatron

RECORD = Path(__file__).with_name("megatron_flags.json")
"""Written by ``make docs``, from the parser of the megatron-core that is installed there; a version
is added to the others where its flags are the same."""

_ACTIONS: Mapping[str, Any] = MappingProxyType(
    {
        "value": "store",
        "true": "store_true",
        "false": "store_false",
        "boolean": argparse.BooleanOptionalAction,
    }
)


def parse_flags(argv: Sequence[str]) -> argparse.Namespace:
    """Return what Megatron's parser makes of ``argv``, unvalidated; ConfigError where it fails."""
    installed = find_package("megatron-core")
    if installed is None or is_recorded(installed):
        try:
            return _recorded_parser().parse_args(list(argv))
        except ConfigError:
            if installed is None:
                raise
    return parse_with_megatron(argv)  # imports it, which takes seconds


def is_recorded(installed: Package) -> bool:
    """Return whether the record has the flags of this megatron-core, a release."""
    return installed.version in _read_record()["versions"] and not installed.checkout


def _layer_pattern(text: str) -> int | list[int]:
    """Return a number, or the list that an expression such as ``([0]*3+[1]*58)`` stands for."""
    if "[" not in text:
        return int(text)
    try:
        pattern: int | list[int] = _evaluate(ast.parse(text, mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:  # of too many brackets
        raise ValueError(f"expected lists and numbers, got {text[:60]}") from error
    return pattern


def _evaluate(node: ast.expr) -> Any:
    """Return the value of lists, numbers, sums and products; ValueError of anything else.

    Lists are cut to one element more than any model has layers.
    """
    match node:
        case ast.Constant(value=int() as number):
            return number
        case ast.List(elts=items):
            return [_evaluate(item) for item in items]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _cut(_evaluate(left) + _evaluate(right))
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            one, other = _evaluate(left), _evaluate(right)
            if isinstance(one, list) != isinstance(other, list):
                items, times = (one, other) if isinstance(one, list) else (other, one)
                return _cut(items * min(times, MOST_LAYERS + 1))
            return one * other
    raise ValueError(f"expected lists and numbers, got {ast.unparse(node)[:60]}")


def _cut(value: Any) -> Any:
    return value[: MOST_LAYERS + 1] if isinstance(value, list) else value


TYPES: Mapping[str, Callable[[str], Any]] = MappingProxyType(
    {"int": int, "float": float, "str": str, "bool": bool, "moe_freq_type": _layer_pattern}
)
"""Types of values by the name they have in Megatron; all others stay text."""


@functools.cache
def _read_record() -> Any:
    return json.loads(RECORD.read_text(encoding="utf-8"))


@functools.cache
def _recorded_parser() -> argparse.ArgumentParser:
    parser = FlagsParser(allow_abbrev=False)
    for flag in _read_record()["flags"]:
        words: dict[str, Any] = {
            key: flag[key] for key in ("dest", "nargs", "choices", "default") if key in flag
        }
        if flag["action"] == "value":
            words["type"] = TYPES.get(flag.get("type", "str"), str)
        parser.add_argument(*flag["names"], action=_ACTIONS[flag["action"]], **words)
    return parser
