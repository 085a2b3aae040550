"""Gather planes of a bucket, and the planes of a weight within them."""

import torch

from moe_optim.buckets.planes import GatherPlane
from moe_optim.formats import BlockScaledFormat, QuantizedWeight


def make_planes(format: BlockScaledFormat, numel: int, device="cpu") -> dict[str, GatherPlane]:
    """Return one plane for everything that travels, but for the amaxes, full of 0xA5."""
    kinds = {"data": format.data_bytes_per_element, "scale": format.scale_bytes_per_element}
    planes = {}
    for direction in format.wire_directions:
        for kind, ratio in kinds.items():
            name = f"{direction}_{kind}"
            data = torch.full((int(numel * ratio),), 0xA5, dtype=torch.uint8, device=device)
            planes[name] = GatherPlane(name=name, bytes_per_element=ratio, data=data)
    return planes


def plane_views(
    planes: dict[str, GatherPlane],
    format: BlockScaledFormat,
    shape: tuple[int, int, int],
    start: int,
) -> dict[str, torch.Tensor]:
    """Return the planes of a weight at element ``start`` of the bucket, without a copy."""
    like = QuantizedWeight.empty(format, shape, device="meta").wire_planes()
    numel = shape[0] * shape[1] * shape[2]
    views = {
        name: plane.data.narrow(
            0, int(start * plane.bytes_per_element), int(numel * plane.bytes_per_element)
        )
        .view(like[name].dtype)
        .view(like[name].shape)
        for name, plane in planes.items()
    }
    if format.columnwise_copy == "shared":
        views["columnwise_data"] = views["rowwise_data"]
    return views
