"""Enables and disables the plug-in in this process; holds its configuration."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Literal, get_args

from moe_optim import import_hook
from moe_optim.config import MoEOptimConfig
from moe_optim.errors import ConfigError, StateError
from moe_optim.integration import patches
from moe_optim.integration.engine import Patch, apply_patches, revert_patches

HOLDER = "the plug-in"
OPTIMIZERS = "optimizers that were built"
"""Holders of patches: the installation, and optimizers, which outlive the call that built them."""

Optimizer = Literal["adam", "muon"]  # optimizer of the matrices; Adam steps all else

_config: MoEOptimConfig | None = None
_optimizer: Optimizer | None = None
"""None: not installed, or by a flag, before Megatron has parsed its arguments."""


def install(config: MoEOptimConfig | None = None, *, optimizer: Optimizer = "adam") -> None:
    """Make Megatron build this package's portable experts, buffers, bucket groups and optimizers.

    Every rank must call it with the same arguments, before the model is built and wrapped.
    Repeated calls with equal arguments are no-ops. ``get_megatron_optimizer`` is also rebound in
    every loaded module that has imported it, under whatever name.

    Args:
        config: settings of the plug-in; None for ``MoEOptimConfig()``.
        optimizer: value of ``OptimizerConfig.optimizer`` from which the optimizer will be built.
            With ``muon``, buffers are laid out such that every matrix has one owner.

    Raises:
        ConfigError: ``config`` has another type, or ``optimizer`` is neither ``adam`` nor ``muon``.
        StateError: another configuration or optimizer is installed.
        PatchError: Megatron's version is not supported; nothing was changed.
    """
    config = MoEOptimConfig() if config is None else config
    if not isinstance(config, MoEOptimConfig):
        raise ConfigError(
            f"install: expected a MoEOptimConfig, got {config!r}. Write "
            'install(MoEOptimConfig(format="mxfp8")).'
        )
    if optimizer not in get_args(Optimizer):
        raise ConfigError(
            f"install: optimizer: expected adam or muon, got {optimizer!r}. Write "
            'install(config, optimizer="muon").'
        )
    import_hook.disarm()
    _install(config, patches.INSTALLED, optimizer)


def install_by_flag(config: MoEOptimConfig) -> None:
    """Install ``config`` before Megatron parses arguments; :func:`set_optimizer` must follow."""
    import_hook.disarm()
    _install(config, patches.INSTALLED)


def install_in_patched_tree(config: MoEOptimConfig) -> None:
    """Install ``config`` in a patched tree, which requests this package's classes itself.

    Rebinds few names; :func:`set_optimizer` must follow.
    """
    remedy = "Give the same flags, or drop the call of moe_optim.install()."
    needed = (*patches.ADAM, *patches.TE_EXPERTS, *patches.CHECKPOINTS_OF_RANKS)
    _install(config, needed, None, "--use-moe-grouped-optim", remedy)


def _install(
    config: MoEOptimConfig,
    needed: tuple[Patch, ...],
    optimizer: Optimizer | None = None,
    where: str = "install",
    remedy: str = "Call moe_optim.uninstall() first.",
) -> None:
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
    if optimizer is not None:
        _check_optimizer(optimizer, where, remedy)
    apply_patches(needed, HOLDER)
    _config = config
    if optimizer is not None:
        set_optimizer(optimizer)


def set_optimizer(optimizer: Optimizer) -> None:
    """Record the optimizer of validated arguments; StateError if :func:`install` named another."""
    global _optimizer
    remedy = f'Call moe_optim.install(config, optimizer="{optimizer}"), or give the other.'
    _check_optimizer(optimizer, "--optimizer", remedy)
    _optimizer = optimizer


def _check_optimizer(optimizer: Optimizer, where: str, remedy: str) -> None:
    if _optimizer not in (None, optimizer):
        raise StateError(
            f"{where}: expected the optimizer that is installed, {_optimizer}, got {optimizer}. "
            f"{remedy}"
        )


def uninstall() -> None:
    """Restore Megatron; existing models and optimizers keep their classes and configuration.

    They still train and save, but can load checkpoints only while the plug-in is installed. Modules
    that have imported Megatron's factory meanwhile keep a function that calls Megatron's own now.
    """
    global _config, _optimizer
    revert_patches(reversed(patches.INSTALLED), HOLDER)
    revert_patches(patches.CHECKPOINTS, OPTIMIZERS)
    revert_patches((*patches.COPIES, *patches.BRIDGE), HOLDER)
    _config = _optimizer = None


def installed_config() -> MoEOptimConfig | None:
    """Return the installed configuration, or None.

    Read it only where Megatron calls this package or constructs its objects, and pass it down.
    """
    return _config


def installed_optimizer() -> Optimizer:
    """Return the optimizer of the matrices, ``adam`` if none is installed.

    Read it only where Megatron calls this package or constructs its objects, and pass it down.
    """
    return _optimizer or "adam"


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
