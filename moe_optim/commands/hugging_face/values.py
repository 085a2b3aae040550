"""Validates arguments and configurations from untrusted files.

Functions return faults, one line each, instead of raising.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal

ValueKind = Literal["count", "number", "flag", "layers", "count?", "number?", "layers?"]
"""Positive integer, finite number, bool, or list of layer numbers; ``?``: may be None."""

_LARGEST = 2**40
MOST_LAYERS = 4096
"""Upper limit on layers, above any real model."""

Values = Mapping[str, Any]
Allowed = Mapping[str, tuple[Any, ...]]


def kind_faults(given: Values, kinds: Mapping[str, ValueKind]) -> list[str]:
    """Return values that are missing or of the wrong kind."""
    return [
        f"{name}: expected {_SPELLED[kind.removesuffix('?')]}, got {_spell(given.get(name))}"
        for name, kind in kinds.items()
        if not _is_kind(given.get(name), kind)
    ]


def unlike(given: Values, allowed: Allowed) -> list[str]:
    """Return values that are not allowed; a missing value is allowed."""
    return [
        f"{name}: expected {values[0]}, got {_spell(given[name])}"
        for name, values in allowed.items()
        if name in given and not any(_equal(given[name], value) for value in values)
    ]


def layer_faults(num_layers: int, freq: Any) -> list[str]:
    """Return why Megatron's ``num_layers`` or ``moe_layer_freq`` is invalid."""
    if num_layers > MOST_LAYERS:
        return [f"layers: expected at most {MOST_LAYERS:,}, got {num_layers:,}"]
    is_pattern = isinstance(freq, list) and len(freq) == num_layers
    if (type(freq) is int and freq > 0) or (
        is_pattern and all(type(x) is int and x in (0, 1) for x in freq)
    ):
        return []
    return [f"moe_layer_freq: expected a number or {num_layers} zeros and ones, got {_spell(freq)}"]


def layers_with_experts(num_layers: int, freq: int | list[int]) -> list[bool]:
    """Return whether each layer has experts, by Megatron's rules for ``moe_layer_freq``."""
    if isinstance(freq, int):
        return [layer % freq == 0 for layer in range(num_layers)]
    return [mark == 1 for mark in freq]


def _is_kind(value: Any, kind: ValueKind) -> bool:
    if value is None:
        return kind.endswith("?")
    if kind == "flag":
        return type(value) is bool
    if kind.startswith("layers"):
        return isinstance(value, list) and all(type(x) is int and x >= 0 for x in value)
    if kind.startswith("count"):
        return type(value) is int and 0 < value < _LARGEST
    return type(value) in (int, float) and math.isfinite(value) and abs(value) < _LARGEST


def _equal(value: Any, allowed: Any) -> bool:
    """Compare as JSON does: true is not 1."""
    is_flag = isinstance(value, bool) or isinstance(allowed, bool)
    return value is allowed if is_flag else bool(type(value) in _PLAIN and value == allowed)


def _spell(value: Any) -> str:
    text = repr(value) if type(value) in (*_PLAIN, bool, list) else "something else"
    return text if len(text) <= 60 else f"{text[:57]}..."


_PLAIN = (int, float, str, type(None))
_SPELLED = {
    "count": "a whole number from 1 on",
    "number": "a number",
    "flag": "true or false",
    "layers": "a list of layers",
}
