"""Enables and disables the plug-in in this process; holds its configuration."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from moe_optim import import_hook
from moe_optim.config import MoEOptimConfig
from moe_optim.errors import ConfigError, StateError
from moe_optim.integration import patches
from moe_optim.integration.engine import Patch, apply_patches, revert_patches

HOLDER = "the plug-in"
OPTIMIZERS = "optimizers that were built"
"""Holders of patches: the installation, and optimizers, which outlive the call that built them."""

_config: MoEOptimConfig | None = None


def install(config: MoEOptimConfig | None = None) -> None:
    """Make Megatron build this package's portable experts, buffers, bucket groups and optimizers.

    Every rank must call it with the same configuration, before the model is built and wrapped.
    Repeated calls with an equal configuration are no-ops.

    Args:
        config: settings of the plug-in; None for ``MoEOptimConfig()``.

    Raises:
        ConfigError: ``config`` has another type.
        StateError: another configuration is installed.
        PatchError: Megatron's version is not supported; nothing was changed.
    """
    config = MoEOptimConfig() if config is None else config
    if not isinstance(config, MoEOptimConfig):
        raise ConfigError(
            f"install: expected a MoEOptimConfig, got {config!r}. Write "
            'install(MoEOptimConfig(format="mxfp8")).'
        )
    import_hook.disarm()
    _install(config, patches.INSTALLED, "install", "Call moe_optim.uninstall() first.")


def install_in_patched_tree(config: MoEOptimConfig) -> None:
    """Install ``config`` in a patched tree, which requests this package's classes itself.

    Rebinds few names. StateError if another configuration is installed.
    """
    remedy = "Give the same flags, or drop the call of moe_optim.install()."
    needed = (*patches.ADAM, *patches.CHECKPOINTS_OF_RANKS)
    _install(config, needed, "--use-moe-grouped-optim", remedy)


def _install(config: MoEOptimConfig, needed: tuple[Patch, ...], where: str, remedy: str) -> None:
    global _config
    if _config is not None and _config != config:
        old, new = asdict(_config), asdict(config)
        differing = [name for name in old if old[name] != new[name]]
        expected, got = (
            ", ".join(f"{name}={one[name]!r}" for name in differing) for one in (old, new)
        )
        raise StateError(
            f"{where}: expected the configuration that is installed, with {expected}, got {got}. "
            f"{remedy}"
        )
    apply_patches(needed, HOLDER)
    _config = config


def uninstall() -> None:
    """Restore Megatron; existing models and optimizers keep their classes and configuration.

    They still train and save, but can load checkpoints only while the plug-in is installed.
    """
    global _config
    revert_patches(reversed(patches.INSTALLED), HOLDER)
    revert_patches(patches.CHECKPOINTS, OPTIMIZERS)
    _config = None


def installed_config() -> MoEOptimConfig | None:
    """Return the installed configuration, or None.

    Read it only where Megatron calls this package or constructs its objects, and pass it down.
    """
    return _config


def config_or_bf16() -> MoEOptimConfig:
    """Return the installed configuration; without one, a configuration for bf16 weights only."""
    return _config or MoEOptimConfig(format="bf16")


@contextmanager
def building_with(config: MoEOptimConfig) -> Iterator[None]:
    """Let Megatron construct objects with ``config`` instead of the installed configuration."""
    global _config
    before, _config = _config, config
    try:
        yield
    finally:
        _config = before
