"""The function that builds the optimizer, in the place of Megatron's."""

import copy
import logging
from typing import Any

from megatron.core import optimizer as core_optimizer
from megatron.core.utils import log_single_rank

from moe_optim.buckets.bucket_group import GroupedBucketGroup, bucket_groups
from moe_optim.config import MoEOptimConfig
from moe_optim.errors import ConfigError
from moe_optim.health.monitor import HealthMonitor
from moe_optim.integration.patching import patches
from moe_optim.integration.patching.active import config_in_force, in_force
from moe_optim.integration.patching.engine import (
    apply_patches,
    is_rebound,
    original,
    revert_patches,
)
from moe_optim.integration.patching.planning import has_masters_of_adam, knobs_with_flags
from moe_optim.optimizer.description import describe
from moe_optim.optimizer.requirements import check_wrapped_model
from moe_optim.optimizer.step import runs_on_kernels, this_device
from moe_optim.weights.managed import is_managed

logger = logging.getLogger(__name__)
_HOLDER = "an optimizer that is being built"
_FACTORY = "megatron.training.training:get_megatron_optimizer"
_core_factory = core_optimizer.get_megatron_optimizer
"""Where nothing is installed; taken now, since a script may put ours in its place by hand."""


def get_megatron_optimizer(
    config: Any,
    model_chunks: list[Any],
    config_overrides: dict[Any, Any] | None = None,
    use_gloo_process_groups: bool = True,
    pg_collection: Any = None,
    dump_param_to_param_group_map: str | None = None,
) -> Any:
    """Build Megatron's optimizer with ``GroupedDistributedOptimizer`` in it.

    A drop-in for ``megatron.core.optimizer.get_megatron_optimizer``, same arguments, same kinds of
    result. Works on models wrapped after ``install()``, and on bf16 models wrapped before it. Every
    rank must call it.

    Args:
        config: Megatron's ``OptimizerConfig``; left alone.
        model_chunks: DDP-wrapped chunks of this rank's pipeline stage.
        config_overrides: settings of parameter groups, as Megatron's factory takes them.
        use_gloo_process_groups: whether gloo groups exist for checkpoints.
        pg_collection: process groups; None takes those of ``parallel_state``.
        dump_param_to_param_group_map: a path to which Megatron saves which parameter is in which
            group; None saves nothing.

    Raises:
        ConfigError: a flag the plug-in does not support, by its name.
        StateError: the model holds quantized weights that were wrapped before ``install()``.
        PatchError: Megatron is not the version this package was written for.
    """
    check_wrapped_model(config, model_chunks)
    wants_graph, wants_host = config.optimizer_cuda_graph, config.optimizer_cpu_offload
    shares_memory = config.reuse_grad_buf_for_mxfp8_param_ag
    knobs = knobs_with_flags(config_in_force(), config)
    config = _settle(config, knobs, model_chunks)
    if shares_memory:
        log_single_rank(
            logger,
            logging.INFO,
            "moe_optim: --reuse-grad-buf-for-mxfp8-param-ag holds with the flag or without: a "
            "gather of quantized weights takes no memory beside the gradients'",
        )
    groups = list(bucket_groups(model_chunks))
    if groups and not any(isinstance(group, GroupedBucketGroup) for group in groups):
        log_single_rank(
            logger,
            logging.INFO,
            "moe_optim: adopted a bf16 model that was wrapped before install(): layout stock, "
            "wire bf16",
        )
    classes = ("distributed-optimizer", "chained-optimizer")
    construction = [patch for patch in patches.OPTIMIZER if patch.id in classes]
    apply_patches(construction, _HOLDER)
    try:
        stock = original(_FACTORY) if is_rebound(_FACTORY) else _core_factory
        with in_force(knobs):
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
    if wants_graph and not optimizer.is_fused:
        raise ConfigError(
            "--optimizer-cuda-graph: expected a fused step to capture, got step: stock, which "
            "decides on the host what non-finite gradients do. Set --moe-optim-set step=fused, "
            "and layout=aligned, or drop the flag."
        )
    if wants_graph and not _can_be_captured(optimizer):
        raise ConfigError(
            "--optimizer-cuda-graph: expected a GPU of compute capability 8.9 or newer and Triton, "
            "got a step in plain torch, which asks the device whether weights move. Drop the flag."
        )
    optimizer.health = HealthMonitor(optimizer, knobs.health_interval, knobs.backend)
    optimizer.observers.append(optimizer.health)
    if knobs.offload_states:
        _report_host_states(optimizer, knobs.offload_states, by_flag=wants_host)
    elif wants_host:
        log_single_rank(
            logger,
            logging.WARNING,
            "moe_optim: --optimizer-cpu-offload: nothing is on the host, as the fraction "
            "(optimizer_offload_fraction) is 0",
        )
    report = f"{describe(model_chunks, optimizer)}\nknobs: {knobs.changes()}"
    log_single_rank(logger, logging.INFO, report)
    return optimizer


def _can_be_captured(optimizer: Any) -> bool:
    """Return whether kernels step all there is; a CPU captures nothing."""
    return this_device().type != "cuda" or all(map(runs_on_kernels, optimizer.stepping))


def _settle(config: Any, knobs: MoEOptimConfig, model_chunks: list[Any]) -> Any:
    """Return the configuration for Megatron's factory, without what is done here in another way.

    Adam need not be capturable for a graph of the fused step, and steps states on the host without
    ``HybridDeviceOptimizer``. With ``use_precision_aware_optimizer`` Megatron lets Adam keep all
    masters, unless ``fp8_recipe`` says that weights are quantized; that of portable and of NVFP4
    weights does not.
    """
    params = (param for chunk in model_chunks for param in chunk.parameters())
    settled = {"optimizer_cuda_graph": False, "optimizer_cpu_offload": False}
    settled["reuse_grad_buf_for_mxfp8_param_ag"] = False  # here, so that all parts share one
    if not has_masters_of_adam(config, knobs, quantized=any(map(is_managed, params))):
        settled["use_precision_aware_optimizer_no_fp8_or_ds_fp8"] = False
    changed = {name: value for name, value in settled.items() if getattr(config, name) != value}
    if changed:
        config = copy.copy(config)
        vars(config).update(changed)
    return config


def _report_host_states(optimizer: Any, fraction: float, *, by_flag: bool) -> None:
    """Say how much lies on the host.

    Args:
        optimizer: as it was built.
        fraction: ``offload_states``.
        by_flag: whether ``--optimizer-cpu-offload`` asks for it.

    Raises:
        ConfigError: steps are not fused.
    """
    if not optimizer.is_fused:
        asked, remedy = "moe_optim: offload_states", "offload_states=0"
        if by_flag:
            asked, remedy = "--optimizer-cpu-offload", "drop the flag"
        reason = optimizer.why_not_fused()
        found = f" for {reason}" if reason else ""
        change = "Remove that" if reason else "Set --moe-optim-set step=fused"
        raise ConfigError(
            f"{asked}: expected a fused step, got step: stock{found}, which steps states on the "
            f"device. {change}, or {remedy}."
        )
    on_host = sum(part.host_states.numel for part in optimizer.stepping)
    groups = (group for part in optimizer.stepping for group in part.shard_fp32_groups)
    staying = sum(master.numel() for group in groups for master in group)
    log_single_rank(
        logger,
        logging.INFO,
        f"moe_optim: offload_states: {fraction}: masters and moments of {on_host:,} elements of "
        f"this rank are on the host"
        + (f"; those of {staying:,} in fp32 parameters stay on the device" if staying else ""),
    )
    if by_flag:
        log_single_rank(
            logger,
            logging.INFO,
            "moe_optim: --optimizer-cpu-offload is offload_states here: states are stepped on the "
            "device, in chunks whose copies both ways overlap, in pinned memory. "
            "--overlap-cpu-optimizer-d2h-h2d, --use-torch-optimizer-for-cpu-offload, "
            "--no-pin-cpu-grads and --no-pin-cpu-params have nothing to change",
        )
