"""Parameters in a bucket, laid as Megatron lays them."""

from collections.abc import Iterable

from moe_optim.layout.wire import Slot


def side_by_side(shapes: Iterable[tuple[int, int, int]]) -> list[Slot]:
    """Return a slot for each shape; each starts at the next multiple of 64 elements."""
    slots: list[Slot] = []
    for index, shape in enumerate(shapes):
        start = -(-slots[-1].end // 64) * 64 if slots else 0
        slots.append(Slot(name=f"weight{index}", start=start, shape=shape))
    return slots
