"""Weights with per-tensor scaling in Megatron's buffers, without Transformer Engine."""

from typing import Any

import torch
import torch.distributed as dist

from tests.support.te import te_stand_ins
from tests.support.te.te_stand_ins import Float8CurrentScalingQuantizer, Float8Tensor


def make_weight(values: torch.Tensor) -> Any:
    """Return a tensorwise parameter of ``values``, [R, C], whose master starts from them."""
    stand_in = Float8Tensor(values, Float8CurrentScalingQuantizer())
    weight = te_stand_ins.as_tensor(stand_in, values.bfloat16())
    weight._is_param = True
    return weight.requires_grad_()


def cast_to_one_scale(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return E4M3 codes of a weight, uint8, and the factor that dequantizes them."""
    values = master.bfloat16().float()
    amax = values.abs().max()
    scale = torch.full_like(amax, 448.0) / amax  # rounded once, which `448.0 / amax` is not
    return (values * scale).to(torch.float8_e4m3fn).view(torch.uint8), 1.0 / scale


def teach_megatron() -> list[int]:
    """Make Megatron store and cast such weights, for the rest of this process.

    Returns:
        Number of weights of each cast, appended as Megatron casts.
    """
    from megatron.core import fp8_utils

    counts: list[int] = []

    def quantize(weights: Any, masters: Any, starts: Any, group: Any, *_: Any) -> None:
        if not weights:
            return
        counts.append(len(weights))
        for weight, master, start in zip(weights, masters, starts, strict=True):
            whole = torch.zeros(weight.numel())
            end = start = start or 0
            if master is not None:
                end = start + master.numel()
                whole[start:end] = master
            dist.all_reduce(whole, group=group)
            codes, weight._scale_inv[:] = cast_to_one_scale(whole)
            weight._data.view(-1)[start:end] = codes[start:end]

    fp8_utils.HAVE_TE_FP8_TENSOR_CLASS = True
    fp8_utils.FP8_TENSOR_CLASS = type(make_weight(torch.ones(1, 1)))
    fp8_utils._modify_underlying_storage_impl = _move
    fp8_utils._quantize_param_shard_impl = quantize
    return counts


def _move(weight: Any, memory: torch.Tensor) -> None:
    memory.copy_(weight._data)
    weight._data = memory
