"""The optimizer factory that replaces Megatron's."""

import copy
import logging
from dataclasses import replace
from functools import wraps
from typing import Any

from megatron.core import optimizer as core_optimizer
from megatron.core.utils import log_single_rank

from moe_optim.buckets.bucket_group import GroupedBucketGroup, bucket_groups
from moe_optim.config import MoEOptimConfig
from moe_optim.errors import StateError
from moe_optim.experts.converters import guard_converters
from moe_optim.experts.operands import copies_in
from moe_optim.integration import patches
from moe_optim.integration.engine import apply_patches, is_rebound, original, revert_patches
from moe_optim.integration.installation import (
    building_with,
    config_or_bf16,
    installed_config,
    installed_optimizer,
)
from moe_optim.optimizer.chained import runs_on_kernels
from moe_optim.optimizer.description import describe
from moe_optim.optimizer.requirements import check_model, require_wrapped_for
from moe_optim.places import this_device
from moe_optim.rules import Setup, check_setup, config_with_flags, remarks

logger = logging.getLogger(__name__)
_HOLDER = "an optimizer that is being built"
_FACTORY = "megatron.training.training:get_megatron_optimizer"
_CLASSES = ("distributed-optimizer", "chained-optimizer")
_REPLACED_FLAGS = (
    "optimizer_cuda_graph",
    "optimizer_cpu_offload",
    "reuse_grad_buf_for_mxfp8_param_ag",  # here, so that all parts share one configuration
)
_core_factory = core_optimizer.get_megatron_optimizer
"""Factory to use when nothing is installed; captured at import, before a script can replace it."""


def get_megatron_optimizer(
    config: Any,
    model_chunks: list[Any],
    config_overrides: dict[Any, Any] | None = None,
    use_gloo_process_groups: bool = True,
    pg_collection: Any = None,
    dump_param_to_param_group_map: str | None = None,
) -> Any:
    """Build Megatron's optimizer with ``GroupedDistributedOptimizer`` in it.

    A drop-in for ``megatron.core.optimizer.get_megatron_optimizer``, with the same arguments and
    result types. Accepts models wrapped after ``install()``, and bf16 models wrapped before it.
    Every rank must call it.

    Args:
        config: Megatron's ``OptimizerConfig``; not modified.
        model_chunks: DDP-wrapped chunks of this rank's pipeline stage.
        config_overrides: parameter group settings, as for Megatron's factory.
        use_gloo_process_groups: whether gloo groups exist for checkpoints.
        pg_collection: process groups; None uses ``parallel_state``.
        dump_param_to_param_group_map: path where Megatron saves the mapping of parameters to
            groups; None saves nothing.

    Raises:
        ConfigError: a flag is not supported; the message names it.
        StateError: the model holds quantized weights that were wrapped before ``install()``, or was
            wrapped for another optimizer.
        PatchError: this version of Megatron is not supported.
    """
    guard_converters()  # those imported since the experts were built
    setup = check_model(config, model_chunks, config_or_bf16())
    is_adopted = _is_adopted(model_chunks)
    if not is_adopted:
        _check_optimizer(config.optimizer)
    moe_optim_config = config_with_flags(setup.config, config)
    config = _without_replaced_flags(config, setup)
    construction = [patch for patch in patches.OPTIMIZER if patch.id in _CLASSES]
    apply_patches(construction, _HOLDER)
    try:
        stock = original(_FACTORY) if is_rebound(_FACTORY) else _core_factory
        with building_with(moe_optim_config):
            require_wrapped_for(config.optimizer, model_chunks)
            if config.optimizer == "muon":  # Megatron's own factory ignores the path, too
                from moe_optim.optimizer.muon_distributed import build_muon

                optimizer = build_muon(
                    config, model_chunks, config_overrides, use_gloo_process_groups, pg_collection
                )
            else:
                optimizer = stock(
                    config,
                    model_chunks,
                    config_overrides=config_overrides,
                    use_gloo_process_groups=use_gloo_process_groups,
                    pg_collection=pg_collection,
                    dump_param_to_param_group_map=dump_param_to_param_group_map,
                )
    finally:
        revert_patches(construction, _HOLDER)
    can_capture = not optimizer.is_fused or _can_be_captured(optimizer)
    setup = replace(setup, stock_reason=optimizer.stock_reason, can_capture=can_capture)
    check_setup(setup, "moe_optim")
    _register_observers(optimizer, model_chunks, moe_optim_config)
    if is_adopted:
        _log("adopted a bf16 model that was wrapped before install(): layout stock, wire bf16")
    for remark in remarks(setup, "note"):
        _log(remark)
    for remark in remarks(setup, "warn"):
        _log(remark, logging.WARNING)
    if moe_optim_config.offload_states:
        _log_host_states(optimizer, moe_optim_config.offload_states)
    _log(f"{describe(model_chunks, optimizer)}; config: {moe_optim_config.changes()}")
    return optimizer


@wraps(get_megatron_optimizer, assigned=())  # for its signature
def get_installed_optimizer(*args: Any, **kwargs: Any) -> Any:
    """Build the optimizer where training loops call Megatron's factory.

    Modules that have imported this name keep it after ``uninstall()``, and then get Megatron's own.
    """
    is_installed = installed_config() is not None
    return (get_megatron_optimizer if is_installed else _core_factory)(*args, **kwargs)


def _register_observers(optimizer: Any, model_chunks: list[Any], config: MoEOptimConfig) -> None:
    if config.health_interval:
        from moe_optim.health.monitor import HealthMonitor

        optimizer.health = HealthMonitor(optimizer, config.health_interval, config.backend)
        optimizer.observers.append(optimizer.health)
    if copies := [one for chunk in model_chunks for one in copies_in(chunk)]:
        from moe_optim.experts.weight_copies import StepEnd

        optimizer.observers.append(StepEnd(copies))


def _is_adopted(model_chunks: list[Any]) -> bool:
    """Return whether a model was wrapped before ``install()``; False without parameters."""
    groups = list(bucket_groups(model_chunks))
    return bool(groups) and not any(isinstance(group, GroupedBucketGroup) for group in groups)


def _check_optimizer(name: str) -> None:
    """Raise StateError if buffers are laid out for an optimizer other than ``name``."""
    expected = installed_optimizer()
    if installed_config() is not None and name != expected:
        raise StateError(
            f"OptimizerConfig.optimizer: expected {expected}, which moe_optim is installed for and "
            f"buffers are laid out for, got {name}. Give {expected} here, or call "
            f'moe_optim.install(config, optimizer="{name}") before the model is wrapped with DDP.'
        )


def _log(text: str, level: int = logging.INFO) -> None:
    log_single_rank(logger, level, f"moe_optim: {text}")


def _can_be_captured(optimizer: Any) -> bool:
    return this_device().type != "cuda" or all(map(runs_on_kernels, optimizer.stepping))


def _without_replaced_flags(config: Any, setup: Setup) -> Any:
    """Return the configuration for Megatron's factory, without flags that this package implements.

    Adam need not be capturable for a graph of the fused step, and needs no
    ``HybridDeviceOptimizer`` for host-resident states. With ``use_precision_aware_optimizer``
    Megatron lets Adam hold all masters unless ``fp8_recipe`` is set, which it is not for portable
    and NVFP4 weights.
    """
    settled = dict.fromkeys(_REPLACED_FLAGS, False)
    if not setup.adam_holds_masters:
        settled["use_precision_aware_optimizer_no_fp8_or_ds_fp8"] = False
    changed = {name: value for name, value in settled.items() if getattr(config, name) != value}
    if changed:
        config = copy.copy(config)
        vars(config).update(changed)
    return config


def _log_host_states(optimizer: Any, fraction: float) -> None:
    on_host = sum(part.host_states.numel for part in optimizer.stepping)
    groups = (group for part in optimizer.stepping for group in part.shard_fp32_groups)
    staying = sum(master.numel() for group in groups for master in group)
    _log(
        f"offload_states: {fraction}: masters and moments of {on_host:,} elements of this rank are "
        "on the host"
        + (f"; those of {staying:,} in fp32 parameters stay on the device" if staying else "")
    )
