"""What ``${...}`` stands for in recipes and assignments, resolved by OmegaConf in bounded time."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from moe_optim.config.plain_yaml import quote
from moe_optim.errors import ConfigError

_REFERENCE = "${"
_TO_ENVIRONMENT = "${oc.env:"
_TO_VALUE = re.compile(r"\$\{(\w+)\.([^${}.:\[\]]+)\}")
_MAX_PARSED = 2**15  # characters: the parser takes 50 microseconds for one
_MAX_RESOLVED = 2**24  # characters


def merge(where: str, *layers: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return sections merged, the later layer winning, with every ``${...}`` replaced.

    Args:
        where: how errors call the layers.
        layers: section -> key -> a plain value, or a list of them.

    Raises:
        ConfigError: naming the key whose interpolation leads nowhere, to itself, or to too much.
    """
    _check_growth(where, layers)
    try:
        resolved: Any = OmegaConf.to_container(OmegaConf.merge(*layers), resolve=True)
    except (OmegaConfBaseException, RecursionError) as error:
        is_deep = isinstance(error, RecursionError)
        reason = "interpolations nested too deep" if is_deep else str(error).partition("\n")[0]
        key = "" if is_deep else f"{error.full_key}: "  # type: ignore[union-attr]
        raise ConfigError(
            f"{where}: {key}expected an interpolation that resolves, got {quote(reason)}. Correct "
            "the ${...} in it."
        ) from None
    return dict(resolved)


def _check_growth(where: str, layers: Iterable[Mapping[str, Mapping[str, Any]]]) -> None:
    """Refuse what takes long to parse, and values that refer to values, and so on, to fill memory.

    A value with n references to values that have references themselves takes up to n times what
    those take, so the product over all values bounds what any of them becomes.
    """
    values = [
        ((section, key), [str(item) for item in (value if isinstance(value, list) else [value])])
        for layer in layers
        for section, mapping in layer.items()
        for key, value in mapping.items()
    ]
    places = {place for place, items in values if any(_REFERENCE in item for item in items)}
    growth, references, parsed, size, longest = 1, 0, 0, 0, 0
    for _, items in values:
        text = "\n".join(items)
        to_values = text.count(_REFERENCE) - text.count(_TO_ENVIRONMENT)
        ends = sum(target not in places for target in _TO_VALUE.findall(text))
        growth *= max(1, to_values - ends)
        references += to_values
        parsed += sum(_parsed_chars(item) for item in items)
        size += len(text)
        longest = max(longest, len(text))
    resolved = size + references * longest
    if growth * parsed > _MAX_PARSED or growth * resolved > _MAX_RESOLVED:
        raise ConfigError(
            f"{where}: expected interpolations of at most {_MAX_PARSED:,} characters that become "
            f"at most {_MAX_RESOLVED:,}, got more. Write values out that ${{...}} stands for."
        )


def _parsed_chars(text: str) -> int:
    """Return how much of a text lies between the first ``${`` and the last ``}``, or the end."""
    start = text.find(_REFERENCE)
    if start < 0:
        return 0
    end = text.rfind("}", start) + 1
    return (end or len(text)) - start
