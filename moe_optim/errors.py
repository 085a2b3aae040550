"""The five kinds of errors that moe_optim raises.

Messages follow one pattern: *where: what was expected, got what. What to change.*
"""

from collections.abc import Iterable, Mapping, Sequence


class MoEOptimError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(MoEOptimError, ValueError):
    """A recipe, a flag or a combination of flags that cannot be honoured."""


class LayoutError(MoEOptimError, ValueError):
    """Tensors, state-dict keys or checkpoints do not have the promised shape or names."""


class PatchError(MoEOptimError, RuntimeError):
    """Megatron, Transformer Engine or torch differs from what a replacement was written for."""


class StateError(MoEOptimError, RuntimeError):
    """A storage does not hold the requested content, or an event came out of order."""


class NonFiniteError(MoEOptimError, ArithmeticError):
    """A gradient or a master weight is Inf or NaN."""


def closest(word: str, known: Iterable[str], *, likeness: float = 0.6) -> str | None:
    """Return the known word that is spelt most like another, None if none is alike.

    Args:
        word: misspelt word.
        known: valid words.
        likeness: required ratio of equal letters, 0 to 1.
    """
    import difflib  # importing this package should not wait for it

    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=likeness)), None)


def refuse(settings: Mapping[str, object], *, expected: str, remedy: str) -> None:
    """Refuse a configuration by every setting in it that is not supported.

    Args:
        settings: setting, as the user wrote it -> whether this configuration has it.
        expected: beginning of the message: where, and what was expected.
        remedy: change that mends it.

    Raises:
        ConfigError: one of them is true; all that are, are named.
    """
    found = [setting for setting, is_set in settings.items() if is_set]
    if found:
        raise ConfigError(f"{expected}, got {'; '.join(found)}. {remedy}")


def raise_faults(where: str, faults: Sequence[str]) -> None:
    """Refuse a command line by all of its faults.

    Args:
        where: name of the command line.
        faults: one line each, with its remedy.

    Raises:
        ConfigError: there are some; one line for each.
    """
    if faults:
        count = f"{len(faults)} faults" if len(faults) > 1 else "1 fault"
        lines = [f"{where}: expected what Megatron and moe_optim take, got {count}:", *faults]
        raise ConfigError("\n  ".join(lines))
