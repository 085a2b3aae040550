"""The configuration that is in force in this process; :mod:`installation` sets it."""

from collections.abc import Iterator
from contextlib import contextmanager

from moe_optim.config import MoEOptimConfig
from moe_optim.errors import StateError

_active: MoEOptimConfig | None = None


def activate(config: MoEOptimConfig | None) -> None:
    """Put a configuration in force; None takes it back."""
    global _active
    _active = config


@contextmanager
def in_force(config: MoEOptimConfig) -> Iterator[None]:
    """Have a configuration in force for what is built in a block, and then again what was."""
    before = _active
    activate(config)
    try:
        yield
    finally:
        activate(before)


def installed_config() -> MoEOptimConfig | None:
    """Return the installed configuration, or None."""
    return _active


def config_in_force() -> MoEOptimConfig:
    """Return the installed configuration, or the defaults where an optimizer is built without.

    Without an installation an optimizer takes bf16 weights alone.
    """
    return _active or MoEOptimConfig(format="bf16")


def active_config() -> MoEOptimConfig:
    """Return the installed configuration; unlike :func:`config_in_force` there is no default.

    Raises:
        StateError: nothing is installed.
    """
    if _active is None:
        raise StateError(
            "moe_optim: expected install() to have run, got no configuration. Call "
            "moe_optim.install() before the model is built."
        )
    return _active
