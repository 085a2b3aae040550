"""Gather buffers of a bucket, and the views that weights have of them."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from moe_optim.buckets.layout import Slot, plan_buffers
from moe_optim.formats import BlockScaledFormat, QuantizedWeight


def make_buffers(
    format: BlockScaledFormat, shapes: Sequence[tuple[int, int, int]], device: str = "cpu"
) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """Return all but the amaxes of what travels, full of 0xA5, and the views of each weight."""
    slots, start = [], 0
    for shape in shapes:
        slots.append(Slot(name="weight", start=start, shape=shape))
        start = slots[-1].end
    plans = [plan for plan in plan_buffers(format, slots, start, 1) if plan.is_sliced]
    buffers = {
        plan.name: torch.full((plan.nbytes,), 0xA5, dtype=torch.uint8, device=device)
        for plan in plans
    }
    views = []
    for index, shape in enumerate(shapes):
        like = QuantizedWeight.empty(format, shape, device="meta").gathered_buffers()
        own = {}
        for plan in plans:
            entries = buffers[plan.name].view(like[plan.name].dtype)
            part = entries.narrow(0, plan.starts[index], prod(plan.shapes[index]))
            own[plan.name] = part.view(plan.shapes[index])
        for columnwise in {"columnwise_data", "columnwise_scale"} - {*format.buffer_names}:
            own[columnwise] = own[columnwise.replace("columnwise", "rowwise")]
        views.append(own)
    return buffers, views
