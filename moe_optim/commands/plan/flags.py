"""Megatron's flags, parsed without importing Megatron.

The import would dominate the time of a plan. ``megatron_flags.json`` records the flags of the
megatron-core versions that it names: nargs, types, choices and defaults. Megatron's own parser is
used if another version is installed, or for layer patterns that only Megatron evaluates.
"""

import argparse
import functools
import importlib.util
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moe_optim.environment import Package, find_package
from moe_optim.errors import ConfigError
from moe_optim.integration.argument_checks import FaultyFlags
from moe_optim.integration.arguments import FlagsParser, parse_with_megatron
from moe_optim.screen import quiet

DTYPES = {
    "fp32": ("torch.float32", 4),
    "bf16": ("torch.bfloat16", 2),
    "fp16": ("torch.float16", 2),
    "fp8": ("torch.uint8", 1),
}
"""Dtype in Megatron's flags -> torch dtype and bytes per element."""
RECORD = Path(__file__).with_name("megatron_flags.json")
"""Written by ``make docs`` from the parser of the installed megatron-core; versions with the same
flags share a record.
"""

_PATTERN = re.compile(r"(?:[][()+*, ]|(?<!\*)\*(?!\*)|(?<!\d)\d{1,4}(?!\d)){1,200}")
"""Lists, sums and products of numbers up to 9999, which cannot be large."""
_FLAT = re.compile(r"\s*\[[\d,\s]*\]\s*")
"""One list of numbers, of any length."""
_ACTIONS: dict[str, Any] = {
    "value": "store",
    "true": "store_true",
    "false": "store_false",
    "boolean": argparse.BooleanOptionalAction,
}


def parse_flags(argv: Sequence[str]) -> argparse.Namespace:
    """Return the namespace that Megatron's parser gives, unvalidated; ConfigError on errors."""
    installed = find_package("megatron-core")
    if installed is None or is_recorded(installed):
        try:
            return recorded_parser().parse_args(list(argv))
        except ConfigError as error:
            if installed is None:
                raise
            if faults := FaultyFlags(recorded_parser(all_patterns=True), argv).faults:
                said = " ".join(faults)
                raise ConfigError(f"megatron_args: {said}") from error
    with quiet():  # the import takes seconds and warns of optional packages
        return parse_with_megatron(argv)


def with_torch_dtypes(args: argparse.Namespace) -> argparse.Namespace:
    """Return a copy of the flags with torch names of dtypes, as in ``OptimizerConfig``."""
    names = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    dtypes = {name: DTYPES[getattr(args, name)][0] for name in names}
    return argparse.Namespace(**vars(args) | dtypes)


def is_recorded(installed: Package) -> bool:
    """Return whether the record covers the flags of this megatron-core release."""
    if importlib.util.find_spec("nvidia_kitchen") is not None:  # for which Megatron adds flags
        return False
    return installed.version in _read_record()["versions"] and not installed.checkout


def _layer_pattern(text: str) -> int | list[int]:
    """Parse a number, or a list expression such as ``([0]*3+[1]*58)``, with Python."""
    if "[" not in text:
        return int(text)
    if not (_PATTERN.fullmatch(text) or _FLAT.fullmatch(text)):
        raise ValueError(f"expected lists and numbers, got {text[:60]}")
    try:
        pattern: int | list[int] = eval(text, {"__builtins__": {}})  # noqa: S307
    except Exception as error:  # of brackets that are calls or indices, or do not match
        raise ValueError(f"expected lists and numbers, got {text[:60]}") from error
    return pattern


TYPES: dict[str, Callable[[str], Any]]
TYPES = {"int": int, "float": float, "str": str, "bool": bool, "moe_freq_type": _layer_pattern}
"""Type name in Megatron -> converter; all other types stay text."""


@functools.cache
def _read_record() -> Any:
    return json.loads(RECORD.read_text(encoding="utf-8"))


def _any_pattern(text: str) -> int | list[int]:
    """Parse what :func:`_layer_pattern` can, and leave the rest, any Python, to Megatron."""
    try:
        return _layer_pattern(text)
    except ValueError:
        return 1


def recorded_parser(*, all_patterns: bool = False) -> argparse.ArgumentParser:
    """Return a parser of the recorded flags.

    Args:
        all_patterns: whether to accept layer patterns that only Megatron can evaluate.
    """
    types = TYPES | ({"moe_freq_type": _any_pattern} if all_patterns else {})
    parser = FlagsParser(allow_abbrev=False)
    for flag in _read_record()["flags"]:
        words: dict[str, Any] = {
            key: flag[key] for key in ("dest", "nargs", "choices", "default") if key in flag
        }
        if flag["action"] == "value":
            words["type"] = types.get(flag.get("type", "str"), str)
        parser.add_argument(*flag["names"], action=_ACTIONS[flag["action"]], **words)
    return parser
