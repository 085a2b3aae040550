"""The five error types of moe_optim.

Message format: *where: what was expected, got what. What to change.*
"""

from collections.abc import Iterable, Mapping, Sequence


class MoEOptimError(Exception):
    """Base class of all errors raised by this package."""


class ConfigError(MoEOptimError, ValueError):
    """Unsupported or invalid recipe, flag or combination of flags."""


class LayoutError(MoEOptimError, ValueError):
    """Unexpected shapes or names of tensors, state-dict keys or checkpoint entries."""


class PatchError(MoEOptimError, RuntimeError):
    """Version of Megatron, Transformer Engine or torch that a replacement does not support."""


class StateError(MoEOptimError, RuntimeError):
    """Storage without the requested content, or calls out of order."""


class NonFiniteError(MoEOptimError, ArithmeticError):
    """Inf or NaN in a gradient or master weight."""


def closest(word: str, known: Iterable[str], *, likeness: float = 0.6) -> str | None:
    """Return the word of ``known`` most like ``word``, None if none is ``likeness`` alike."""
    import difflib  # keeps the import of this package fast

    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=likeness)), None)


def shorten(text: str) -> str:
    """Return ``text`` with its middle elided if longer than 300 characters, for messages."""
    return text if len(text) <= 300 else f"{text[:150]}...{text[-150:]}"


def quote(value: object) -> str:
    """Return the repr of ``value``, shortened, for messages."""
    return shorten(repr(value))


def listed(names: Sequence[str], separator: str = ", ", most: int = 8) -> str:
    """Return ``names`` for an error message, only the first ``most``, joined by ``separator``."""
    shown, more = separator.join(names[:most]), len(names) - most
    return shown if more <= 0 else f"{shown} and {more} more"


def refuse(settings: Mapping[str, object], *, expected: str, remedy: str) -> None:
    """Raise ConfigError that lists all unsupported settings of a configuration.

    ``settings`` map a setting, as the user wrote it, to whether it is set. The message begins with
    ``expected``, place and expectation, and ends with ``remedy``.
    """
    found = [setting for setting, is_set in settings.items() if is_set]
    if found:
        raise ConfigError(f"{expected}, got {'; '.join(found)}. {remedy}")


def raise_faults(where: str, faults: Sequence[str]) -> None:
    """Raise ConfigError with one line per fault of command line ``where``, if there are any."""
    if faults:
        count = f"{len(faults)} problem{'s' if len(faults) > 1 else ''}"
        raise ConfigError("\n  ".join([f"{where}: found {count}:", *faults]))
