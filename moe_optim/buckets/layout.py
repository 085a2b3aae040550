"""Where Megatron lays parameters, and where managed buckets end: later, for whole blocks."""

from dataclasses import replace
from typing import Any

import torch
from megatron.core.optimizer import param_layout
from megatron.core.optimizer.param_layout import PerBufferParamLayout

from moe_optim.buckets.aligned_layout import aligned_end
from moe_optim.buckets.buffer_plan import Slot
from moe_optim.integration.engine import original
from moe_optim.integration.installation import config_or_bf16
from moe_optim.weights.managed import is_managed

_LAYOUT = (
    "megatron.core.optimizer.distrib_optimizer:"
    "DistributedOptimizer._compute_per_buffer_param_layout"
)


class AlignedDistributedOptimizer:
    """Holds the static method that replaces Megatron's."""

    @staticmethod
    def _compute_per_buffer_param_layout(
        params: list[torch.nn.Parameter],
        bucket_size: int | None,
        data_parallel_world_size: int,
        ddp_config: Any,
        param_indices: list[int] | None = None,
    ) -> PerBufferParamLayout:
        """Lay out one buffer; arguments and result are Megatron's.

        Parameters keep their distance from the start of their bucket; see ``layout/aligned.py``.
        """
        layout = original(_LAYOUT)(
            params, bucket_size, data_parallel_world_size, ddp_config, param_indices
        )
        managed = bool(params) and all(is_managed(param) for param in params)
        if not managed or config_or_bf16().layout == "stock":
            return layout
        divisor = param_layout.bucket_end_divisor(
            data_parallel_world_size, ddp_config.pad_buckets_for_high_nccl_busbw
        )
        return align_buckets(layout, data_parallel_world_size, divisor)


def align_buckets(layout: PerBufferParamLayout, dp_size: int, divisor: int) -> PerBufferParamLayout:
    """Return ``layout`` with later bucket ends.

    Args:
        layout: of a buffer of quantized weights.
        dp_size: shards of each bucket.
        divisor: what Megatron pads bucket ends to.
    """
    places: dict[torch.nn.Parameter, tuple[int, int, int]] = {}
    bounds: list[tuple[int, int]] = []
    end = 0
    for bucket_id, (stock_start, _) in enumerate(layout.bucket_indices):
        inside = {
            param: place for param, place in layout.param_index_map.items() if place[2] == bucket_id
        }
        start = end
        for param, (param_start, param_end, _) in inside.items():
            shift = start - stock_start
            places[param] = (param_start + shift, param_end + shift, bucket_id)
        storages = {param: param.quantized_storage for param in inside}
        slots = [
            Slot(
                name=storages[param].name, start=place[0] - stock_start, shape=storages[param].shape
            )
            for param, place in inside.items()
        ]
        format = next(iter(storages.values())).format
        end = start + aligned_end(format, slots, dp_size=dp_size, divisor=divisor).numel
        bounds.append((start, end))
    return replace(layout, param_index_map=places, bucket_indices=bounds)
