"""Switches the plug-in on and off for this process."""

import logging
from collections.abc import Iterable

from moe_optim.config import MoEOptimConfig, field_names
from moe_optim.errors import ConfigError, StateError
from moe_optim.megatron import patches
from moe_optim.megatron.patching import apply_patches, revert_patches

logger = logging.getLogger(__name__)

_HOLDER = "plugin"
_active: MoEOptimConfig | None = None


def install(config: MoEOptimConfig | None = None) -> None:
    """Make Megatron build portable experts, buffers, bucket groups and optimizers of this package.

    Call it before the model is built and wrapped. A second call with an equal configuration does
    nothing. Every rank must call it with the same configuration.

    Args:
        config: every knob; defaults to ``MoEOptimConfig()``.

    Raises:
        ConfigError: ``config`` is something else.
        StateError: another configuration is installed already.
        PatchError: Megatron is not the version this package was written for; nothing was changed.
    """
    wanted = MoEOptimConfig() if config is None else config
    if not isinstance(wanted, MoEOptimConfig):
        raise ConfigError(
            f"install: expected a MoEOptimConfig, got {wanted!r}. Write "
            'install(MoEOptimConfig(format="mxfp8")).'
        )
    _require_no_other(wanted, "install", "Call moe_optim.uninstall() first.")
    _activate(wanted, (*patches.ADAM, *patches.EXPERTS, *patches.OPTIMIZER))
    logger.info("moe_optim: %s", wanted)


def install_in_patched_tree(config: MoEOptimConfig) -> None:
    """Install in a tree that asks for this package's classes by itself: only Adam is rebound.

    Raises:
        StateError: another configuration is installed already.
    """
    remedy = "Give the same flags, or drop the call of moe_optim.install()."
    _require_no_other(config, "--use-moe-grouped-optim", remedy)
    _activate(config, patches.ADAM)


def install_experts(config: MoEOptimConfig) -> None:
    """Make Megatron build the portable experts and leave its optimizer alone.

    For comparisons with the stock optimizer on the same experts, which must then be bf16.
    """
    _activate(config, (*patches.ADAM, *patches.EXPERTS))


def uninstall() -> None:
    """Put Megatron back as it was; models and optimizers built meanwhile keep their classes."""
    global _active
    revert_patches((*patches.OPTIMIZER, *patches.EXPERTS, *patches.ADAM), _HOLDER)
    _active = None


def _require_no_other(wanted: MoEOptimConfig, where: str, remedy: str) -> None:
    if _active is None or _active == wanted:
        return
    differing = [
        (name, getattr(_active, name), getattr(wanted, name))
        for name in field_names()
        if getattr(_active, name) != getattr(wanted, name)
    ]
    expected = ", ".join(f"{name}={old!r}" for name, old, _ in differing)
    got = ", ".join(f"{name}={new!r}" for name, _, new in differing)
    raise StateError(
        f"{where}: expected the configuration that is installed, with {expected}, got {got}. "
        f"{remedy}"
    )


def _activate(config: MoEOptimConfig, needed: Iterable[patches.Patch]) -> None:
    global _active
    apply_patches(needed, _HOLDER)
    _active = config


def installed_config() -> MoEOptimConfig | None:
    """Return the installed configuration, or None."""
    return _active


def config_in_force() -> MoEOptimConfig:
    """Return the installed configuration, or the defaults where an optimizer is built without."""
    return _active or MoEOptimConfig()


def active_config() -> MoEOptimConfig:
    """Return the configuration in force.

    Raises:
        StateError: nothing is installed.
    """
    if _active is None:
        raise StateError(
            "moe_optim: expected install() to have run, got no configuration. Call "
            "moe_optim.install() before the model is built."
        )
    return _active
