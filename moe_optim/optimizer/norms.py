"""Gradient norms: what counts in which, how ranks share them, and what is clipped by them."""

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer.optimizer import (
    SEPARATE_GRAD_NORM_GROUPS,
    _get_param_grad_norm_group,
)
from megatron.core.utils import log_single_rank
from torch import Tensor

logger = logging.getLogger(__name__)

NORMS = (None, *sorted(SEPARATE_GRAD_NORM_GROUPS))
"""What gradients count in: the main norm, and those that Megatron keeps apart."""


def norm_of(master: Tensor) -> int:
    """Return which of ``NORMS`` the gradient of a master counts in."""
    group = _get_param_grad_norm_group(master)
    return NORMS.index(group) if group in NORMS else 0


def reduced_over_ranks(of_parts: Sequence[Tensor], groups: Sequence[dist.ProcessGroup]) -> Tensor:
    """Return the sum over all optimizers and all ranks. Every rank must call it.

    Args:
        of_parts: what this rank has found for each optimizer, of one shape; they may be reduced.
        groups: ranks that share all optimizers, or those that share each of them.
    """
    if len(groups) == 1:
        of_parts = [torch.stack(list(of_parts)).sum(0)]
    for found, group in zip(of_parts, groups, strict=True):
        dist.all_reduce(found, group=group)
    return torch.stack(list(of_parts)).sum(0)


def norms_of(squares: Tensor, config: Any) -> Tensor:
    """Return the roots of sums of squares, fp32: Inf where fp32 cannot hold the sum, as Megatron's.

    A gradient that is stepped then has a square that second moments can hold, whatever is clipped:
    they are means of such squares. The bound is that of bf16 where second moments are in bf16.

    Args:
        squares: [n] fp64.
        config: Megatron's ``OptimizerConfig``.
    """
    is_narrow = config.use_precision_aware_optimizer
    held_in = config.exp_avg_sq_dtype if is_narrow else torch.float32
    return squares.where(squares <= torch.finfo(held_in).max, squares * torch.inf).sqrt().float()


def clip_factors(norms: Tensor, clip_grad: float, clipped: Sequence[bool] = ()) -> Tensor:
    """Return what gradients are multiplied by: as Megatron has it, and 1 where nothing is clipped.

    Args:
        norms: [n] fp32.
        clip_grad: the largest norm that stays as it is; 0 clips nothing.
        clipped: of each norm, whether Megatron clips by it; empty for all.
    """
    if clip_grad <= 0.0:
        return torch.ones_like(norms)
    factors = (clip_grad / (norms + 1.0e-6)).clamp_max_(1.0)
    for index, is_clipped in enumerate(clipped):
        if not is_clipped:
            factors[index].fill_(1.0)  # an assignment would copy from the host
    return factors


def as_megatron_returns(norm: Tensor) -> Any:
    """Return a norm, fp32 [1], as a tensor where Megatron's own is one, else as a number."""
    return norm if clip_grads.multi_tensor_scale_tensor_impl is not None else norm.item()


def is_too_large(norm: float, threshold: float) -> bool:
    """Return whether a norm is too large for a step to be taken, and say so on one rank."""
    if not (math.isfinite(threshold) and norm > threshold):
        return False
    message = f"moe_optim: step skipped, its gradient norm {norm} is above the threshold"
    log_single_rank(logger, logging.INFO, message)
    return True
