"""Where masters and moments of an optimizer lie."""

from typing import Any

from moe_optim.optimizer.adam import MOMENTS


def segments_of(part: Any) -> set[int]:
    """Return the addresses of the host's memory of one optimizer."""
    if part.host_states is None:
        return set()
    segments = part.host_states._memory._segments
    return {segment.on_host.untyped_storage().data_ptr() for segment, _ in segments}


def share_at_home(optimizer: Any) -> tuple[int, int]:
    """Return how many elements are at home on the host, and of how many.

    A master and its moments are there together, or none of them.
    """
    at_home = total = 0
    for part in optimizer.chained_optimizers:
        segments = segments_of(part)
        for masters in part.shard_fp32_from_float16_groups:
            for master in masters:
                tensors = [master, *(part.optimizer.state[master][name] for name in MOMENTS)]
                places = {one.untyped_storage().data_ptr() in segments for one in tensors}
                assert len(places) == 1 or not master.numel(), "a part of the states of a master"
                total += master.numel()
                at_home += master.numel() * (places == {True})
    return at_home, total
