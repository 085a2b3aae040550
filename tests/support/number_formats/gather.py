"""Gather buffers of a bucket, and the buffers of a weight within them."""

import torch

from moe_optim.buckets.gather_buffer import GatherBuffer
from moe_optim.formats import BlockScaledFormat, QuantizedWeight


def make_buffers(format: BlockScaledFormat, numel: int, device="cpu") -> dict[str, GatherBuffer]:
    """Return one buffer for everything that travels, but for the amaxes, full of 0xA5."""
    kinds = {"data": format.data_bytes_per_element, "scale": format.scale_bytes_per_element}
    buffers = {}
    for direction in format.gathered_directions:
        for kind, ratio in kinds.items():
            name = f"{direction}_{kind}"
            data = torch.full((int(numel * ratio),), 0xA5, dtype=torch.uint8, device=device)
            buffers[name] = GatherBuffer(name=name, bytes_per_element=ratio, data=data)
    return buffers


def buffer_views(
    buffers: dict[str, GatherBuffer],
    format: BlockScaledFormat,
    shape: tuple[int, int, int],
    start: int,
) -> dict[str, torch.Tensor]:
    """Return the buffers of a weight at element ``start`` of the bucket, without a copy."""
    like = QuantizedWeight.empty(format, shape, device="meta").gathered_buffers()
    numel = shape[0] * shape[1] * shape[2]
    views = {
        name: buffer.data.narrow(
            0, int(start * buffer.bytes_per_element), int(numel * buffer.bytes_per_element)
        )
        .view(like[name].dtype)
        .view(like[name].shape)
        for name, buffer in buffers.items()
    }
    if format.columnwise_copy == "shared":
        views["columnwise_data"] = views["rowwise_data"]
    return views
