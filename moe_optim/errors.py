"""The five ways in which moe_optim refuses to go on.

Messages follow one pattern: *where: what was expected, got what. What to change.*
"""

from collections.abc import Iterable, Mapping, Sequence


class MoEOptimError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(MoEOptimError, ValueError):
    """What the user wrote cannot be honoured: a recipe, a flag, a combination of flags."""


class LayoutError(MoEOptimError, ValueError):
    """Tensors, state-dict keys or checkpoints do not have the promised shape or names."""


class PatchError(MoEOptimError, RuntimeError):
    """Megatron, Transformer Engine or torch is not what a replacement was written for."""


class StateError(MoEOptimError, RuntimeError):
    """A storage was asked for what it does not hold, or an event came out of order."""


class NonFiniteError(MoEOptimError, ArithmeticError):
    """A gradient or a master weight is Inf or NaN."""


def closest(word: str, known: Iterable[str], *, likeness: float = 0.6) -> str | None:
    """Return which of the known words was probably meant, None if none is like the one given.

    Args:
        word: as somebody wrote it.
        known: what there is.
        likeness: how much of both has to be the same, 0 to 1.
    """
    import difflib  # what imports this package should not wait for it

    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=likeness)), None)


def refuse(settings: Mapping[str, object], *, expected: str, remedy: str) -> None:
    """Refuse a configuration by every setting in it that is not supported.

    Args:
        settings: what a user wrote -> whether this configuration has it.
        expected: where, and what instead.
        remedy: what to change.

    Raises:
        ConfigError: one of them is true; all that are, are named.
    """
    found = [setting for setting, is_set in settings.items() if is_set]
    if found:
        raise ConfigError(f"{expected}, got {'; '.join(found)}. {remedy}")


def raise_faults(where: str, faults: Sequence[str]) -> None:
    """Refuse a command line by everything that is wrong with it.

    Args:
        where: what is wrong.
        faults: each with its remedy, in one line.

    Raises:
        ConfigError: there are some; one line for each.
    """
    if faults:
        count = f"{len(faults)} faults" if len(faults) > 1 else "1 fault"
        lines = [f"{where}: expected what Megatron and moe_optim take, got {count}:", *faults]
        raise ConfigError("\n  ".join(lines))
