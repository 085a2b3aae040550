"""What ``model.json`` and ``summary.json`` hold of a run, as far as a report reads it."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

Kind = Literal["text", "count", "number", "loss", "mapping", "weights"]
Kinds = Mapping[str, "Kind | Kinds"]

MODEL: Kinds = {
    "format": "text",
    "optimizer": "text",
    "parameters": "count",
    "quantized_parameters": "count",
    "rank0": {
        "step": "text",
        "gathered_bytes": "count",
        "other_gathered_bytes": "count",
        "weights": "weights",
    },
    "environment": {"device": "text", "commit": "text", "versions": "mapping"},
}
SUMMARY: Kinds = {
    "command": "text",
    "world_size": "count",
    "resumed_from": "count",
    "seconds": "number",
    "iterations_per_second": "number",
    "test_loss": "loss",
    "byte_entropy": "number",
}

_MOST = 2**63


def find_fault(given: Mapping[str, Any], kinds: Kinds, above: str = "") -> str | None:
    """Return the key of the first value of another kind, what was expected and what was got.

    What is missing or null was not recorded, and is no fault.
    """
    for name, kind in kinds.items():
        key, value = above + name, given.get(name)
        if value is None:
            continue
        wanted: Kind = "mapping" if isinstance(kind, Mapping) else kind
        if not _IS_KIND[wanted](value):
            return f"{key}: expected {_SPELLED[wanted]}, got {repr(value)[:60]}"
        if isinstance(kind, Mapping) and (fault := find_fault(value, kind, f"{key}.")):
            return fault
    return None


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MOST


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < _MOST


def _has_bytes(value: Any) -> bool:
    return isinstance(value, dict) and _is_count(value.get("weight_bytes"))


_IS_KIND: Mapping[Kind, Callable[[Any], bool]] = {
    "text": lambda value: isinstance(value, str),
    "count": _is_count,
    "number": _is_number,
    "loss": lambda value: _is_number(value) or (type(value) is float and not math.isfinite(value)),
    "mapping": lambda value: isinstance(value, dict),
    "weights": lambda value: isinstance(value, list) and all(map(_has_bytes, value)),
}
_SPELLED: Mapping[Kind, str] = {
    "text": "text",
    "count": "a whole number from 0 on",
    "number": "a finite number",
    "loss": "a number",
    "mapping": "names and values",
    "weights": "a list of weights, each with its weight_bytes",
}
