"""Switches the plug-in on and off for this process."""

from moe_optim import import_hook
from moe_optim.config import MoEOptimConfig, field_names
from moe_optim.errors import ConfigError, StateError
from moe_optim.integration.patching import patches
from moe_optim.integration.patching.active import activate, installed_config
from moe_optim.integration.patching.engine import apply_patches, revert_patches

HOLDER = "the plug-in"
OPTIMIZERS = "optimizers that were built"
"""Who needs patches: those of an installation, and those of optimizers, which outlast the call."""


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
    import_hook.disarm()
    needed = (*patches.ADAM, *patches.EXPERTS, *patches.OPTIMIZER, *patches.CHECKPOINTS)
    needed += patches.CHECKPOINTS_OF_RANKS
    apply_patches(needed, HOLDER)
    activate(wanted)


def install_in_patched_tree(config: MoEOptimConfig) -> None:
    """Install in a tree that asks for this package's classes by itself: not much is rebound.

    Raises:
        StateError: another configuration is installed already.
    """
    remedy = "Give the same flags, or drop the call of moe_optim.install()."
    _require_no_other(config, "--use-moe-grouped-optim", remedy)
    apply_patches((*patches.ADAM, *patches.CHECKPOINTS_OF_RANKS), HOLDER)
    activate(config)


def uninstall() -> None:
    """Put Megatron back as it was; models and optimizers built meanwhile keep their classes.

    They keep their configuration, too, and go on training and saving. Checkpoints load into them
    while the plug-in is installed.
    """
    held = (*patches.CHECKPOINTS, *patches.OPTIMIZER, *patches.EXPERTS, *patches.ADAM)
    held += patches.CHECKPOINTS_OF_RANKS
    revert_patches(held, HOLDER)
    revert_patches(patches.CHECKPOINTS, OPTIMIZERS)
    activate(None)


def _require_no_other(wanted: MoEOptimConfig, where: str, remedy: str) -> None:
    installed = installed_config()
    if installed is None or installed == wanted:
        return
    differing = [
        (name, getattr(installed, name), getattr(wanted, name))
        for name in field_names()
        if getattr(installed, name) != getattr(wanted, name)
    ]
    expected = ", ".join(f"{name}={old!r}" for name, old, _ in differing)
    got = ", ".join(f"{name}={new!r}" for name, _, new in differing)
    raise StateError(
        f"{where}: expected the configuration that is installed, with {expected}, got {got}. "
        f"{remedy}"
    )
