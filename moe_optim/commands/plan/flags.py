"""Megatron's flags, parsed without importing Megatron.

The import would dominate the time of a plan. ``megatron_flags.json`` records the flags of the
megatron-core versions that it names: nargs, types, choices and defaults. Megatron's own parser is
used if another version is installed, or if the flags have errors.
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
from moe_optim.screen import quiet

RECORD = Path(__file__).with_name("megatron_flags.json")
"""Written by ``make docs`` from the parser of the installed megatron-core; versions with the same
flags share a record.
"""

_ACTIONS: Mapping[str, Any] = MappingProxyType(
    {
        "value": "store",
        "true": "store_true",
        "false": "store_false",
        "boolean": argparse.BooleanOptionalAction,
    }
)


def parse_flags(argv: Sequence[str]) -> argparse.Namespace:
    """Return the namespace that Megatron's parser gives, unvalidated; ConfigError on errors."""
    installed = find_package("megatron-core")
    if installed is None or is_recorded(installed):
        try:
            return _recorded_parser().parse_args(list(argv))
        except ConfigError:
            if installed is None:
                raise
    with quiet():  # the import takes seconds and warns of optional packages
        return parse_with_megatron(argv)


def is_recorded(installed: Package) -> bool:
    """Return whether the record covers this megatron-core release."""
    return installed.version in _read_record()["versions"] and not installed.checkout


def _layer_pattern(text: str) -> int | list[int]:
    """Parse a number, or a list expression such as ``([0]*3+[1]*58)``."""
    if "[" not in text:
        return int(text)
    try:
        pattern: int | list[int] = _evaluate(ast.parse(text, mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:  # too many brackets
        raise ValueError(f"expected lists and numbers, got {text[:60]}") from error
    return pattern


def _evaluate(node: ast.expr) -> Any:
    """Evaluate lists, numbers, sums and products; ValueError for anything else.

    Lists are truncated one element above the limit on layers.
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
"""Type name in Megatron -> converter; all other types stay text."""


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
