"""States of ``--ckpt-format torch``: whole buffers in one file, with a manifest of them."""

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from moe_optim.checkpoint.flat_states import manifest_of
from moe_optim.checkpoint.state_manifest import BufferPlaces, CrossReader, StateManifest
from moe_optim.errors import LayoutError


def rearranged_states(
    states: dict[Any, Any], source: StateManifest, optimizer: Any, where: str
) -> dict[Any, Any]:
    """Return legacy states with every expert where ``optimizer`` expects it.

    Args:
        states: of ``get_parameter_state_dp_zero``: buffer -> dtype -> name -> [elements], the
            buckets of a buffer one after the other without padding. Left alone.
        source: manifest that was saved with them, or was found for them.
        optimizer: that loads them.
        where: for errors.

    Raises:
        LayoutError: they are states of other parameters or experts, or shorter than they should.
    """
    target = manifest_of(optimizer)
    reader = CrossReader(source, target, where)
    saved = [_only(states[buffer]) for buffer in range(len(source.buffers))]
    starts = [_bucket_starts(buffer) for buffer in source.buffers]
    for buffer, (tensors, bounds) in enumerate(zip(saved, starts, strict=True)):
        for name, tensor in _tensors(tensors):
            if tensor.numel() != bounds[-1]:
                raise LayoutError(
                    f"{where}: buffer {buffer}: {name}: expected {bounds[-1]} elements as the "
                    f"manifest says, got {tensor.numel()}. The file is damaged; load another one."
                )
    names = [name for held in saved[:1] for name, _ in _tensors(held)]  # all frozen: none
    result: dict[Any, Any] = {"buckets_coalesced": True}
    for buffer, ranges in enumerate(optimizer.gbuf_ranges):
        (dtype,) = ranges
        bounds = _bucket_starts(target.buffers[buffer])
        numel = optimizer.buffers[buffer].numel_unpadded
        made = {name: torch.zeros(numel, dtype=torch.float32, device="cpu") for name in names}
        for bucket, held in enumerate(target.buffers[buffer].buckets):
            for place in held.parameters:
                at = bounds[bucket] + place.start
                for read in reader.reads(place, 0, place.numel):
                    first = starts[read.buffer][read.bucket] + read.start
                    for name in names:
                        part = saved[read.buffer][name][first : first + read.numel]
                        made[name][at : at + read.numel] = part
                    at += read.numel
        result[buffer] = {dtype: {**made, "numel_unpadded": numel}}
    return result


def _only(by_dtype: dict[Any, Any]) -> dict[str, Any]:
    (tensors,) = by_dtype.values()
    return tensors


def _tensors(states: dict[str, Any]) -> list[tuple[str, Tensor]]:
    return [(name, value) for name, value in states.items() if isinstance(value, Tensor)]


def _bucket_starts(buffer: BufferPlaces) -> list[int]:
    """Return where each bucket starts among those of its buffer, and where the last one ends."""
    return [0, *accumulate(bucket.numel for bucket in buffer.buckets)]
