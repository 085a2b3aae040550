"""Megatron's own ``--optimizer-cpu-offload`` on a machine without a GPU."""

from typing import Any

import torch


def run_without_gpus() -> None:
    """Have ``HybridDeviceOptimizer`` put all states on the host, though nothing is on a GPU.

    It looks for parameters that are; those of a CPU it steps without a copy, and then fails.
    """
    from moe_optim.integration import cpu_runtime

    cpu_runtime.install()
    from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

    HybridDeviceOptimizer._get_sub_optimizer_param_groups = _all_on_the_host


def _all_on_the_host(optimizer: Any, _fraction: float) -> tuple[Any, ...]:
    """Return groups on the host and on the device, and which tensor is whose copy."""
    on_host, copies, originals, masters = [], {}, {}, {}
    for group in optimizer.param_groups:
        copied = []
        for param in group["params"]:
            copy = param.detach().clone().float()
            copies[param], originals[copy] = copy, param
            if param.dtype != torch.float32:
                masters[param] = copy
            copied.append(copy)
        if copied:
            on_host.append({**group, "params": copied})
    return on_host, [], copies, originals, masters
