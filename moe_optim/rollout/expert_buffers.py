"""Buffers of experts as ranks store and send them: data, scales and amaxes, before any names.

bf16 weights and biases are one buffer; per-tensor scaling has codes and factors.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_optim.buckets.gather import issued_together
from moe_optim.checkpoint.files.reader import TensorInfo
from moe_optim.experts.keys.layouts import LINEARS
from moe_optim.formats import get_format
from moe_optim.rollout.units import HeldExperts, bucket_nbytes, cut_bucket, flat_bytes, places_in
from moe_optim.weights.te.fields import TENSORWISE


def buffers_of_part(held: HeldExperts, experts: int) -> list[TensorInfo]:
    """Return shapes [E, ...] and dtypes of one rank's buffers, for ``experts`` experts."""
    part = (n // held.cuts if axis == held.cut_axis else n for axis, n in enumerate(held.shape))
    shape = (experts, *part)
    if held.format == "bf16":
        return [TensorInfo(shape, torch.bfloat16)]
    if held.format == TENSORWISE:
        return [TensorInfo(shape, torch.uint8), TensorInfo((experts,), torch.float32)]
    format = get_format(held.format)
    found = [
        TensorInfo(format.data_shape(shape, "rowwise"), torch.uint8),
        TensorInfo(format.scale_shape(shape, "rowwise"), format.scale_dtype),
    ]
    if format.has_global_amax:
        found.append(TensorInfo((experts,), torch.float32))
    return found


def describe_expert(held: HeldExperts) -> list[Tensor]:
    """Return the buffers of one whole expert, on ``meta``."""
    infos = buffers_of_part(replace(held, cut_axis=None, cuts=1), 1)
    return [torch.empty(one.shape, dtype=one.dtype, device="meta") for one in infos]


def join_parts(held: HeldExperts, buffers: Sequence[Tensor], experts: int) -> list[Tensor]:
    """Return buffers of whole experts, given the parts of all ranks.

    Args:
        held: record of the sharded experts.
        buffers: parts [G, T, E, ...] in any shape: G ranks of expert parallelism, T of expert
            tensor parallelism, E experts on each.
        experts: number of experts E.
    """
    runs = 1  # row blocks that are sharded separately, or rows that lose some columns each
    if held.linear.endswith(LINEARS[0]) and held.interleave is None:
        runs = 2
    joined = []
    for buffer in buffers:
        rows, *inner = buffer.shape[1:]
        outer = rows if held.cut_axis else runs
        parts = buffer.reshape(-1, held.cuts, experts, outer, prod([rows, *inner]) // outer)
        whole = parts.permute(0, 2, 3, 1, 4)
        shape = [rows, *inner]
        shape[held.cut_axis or 0] *= held.cuts
        joined.append(whole.reshape(-1, *shape))
    return joined


@dataclass(frozen=True)
class Arriving:
    """Buffers on their way, and the bucket that they arrive in, if any."""

    buffers: Sequence[Tensor] = ()
    bucket: Tensor | None = None
    works: Sequence[Any] = ()

    def wait(self) -> Sequence[Tensor]:
        """Return the buffers; blocks the host on a CPU, or the current stream on a GPU."""
        for work in self.works:
            work.wait()
        return self.buffers


def gather_buffers(buffers: Sequence[Tensor], group: dist.ProcessGroup) -> Arriving:
    """Start to gather buffers [E, ...] of all ranks, by rank [G * E, ...], in one transfer.

    Every rank of ``group`` must call it.
    """
    ranks = group.size()
    infos = [TensorInfo((ranks * one.shape[0], *one.shape[1:]), one.dtype) for one in buffers]
    bucket = torch.empty(bucket_nbytes(infos), dtype=torch.uint8, device=buffers[0].device)
    with issued_together(group, asynchronous=True) as works:  # as bytes: gloo knows no FP8
        places = places_in(bucket, (info.nbytes for info in infos))
        for place, own in zip(places, buffers, strict=True):
            dist.all_gather_into_tensor(place, flat_bytes(own), group=group, async_op=True)
    return Arriving(cut_bucket(bucket, infos), bucket, [works])
