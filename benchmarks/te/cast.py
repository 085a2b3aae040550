"""Transformer Engine's cast of master weights, as a reference for bytes and time."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from moe_optim.errors import PatchError
from moe_optim.formats import DIRECTIONS
from moe_optim.kernels.member_table import TableEntry
from moe_optim.weights.te.recipe import make_quantizer

FORMATS = ("mxfp8", "fp8_block", "fp8_block_fp32")
"""Formats whose master cast Transformer Engine supports on Hopper."""

_POISON = 0x5A


@contextmanager
def group_of_one() -> Iterator[dist.ProcessGroup]:
    """Yield a single-rank process group, over which a cast reduces its maxima."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        world = dist.group.WORLD
        assert world is not None, "init_process_group made no group"
        yield world
    finally:
        dist.destroy_process_group()


class MasterCast:
    """Transformer Engine's weights, cast from the masters of a table's entries.

    Args:
        entries: one expert [1, R, C] each, all in one format of ``FORMATS``.
        group: ranks that own the rest of each master.
    """

    def __init__(self, entries: Sequence[TableEntry], group: dist.ProcessGroup) -> None:
        from transformer_engine.pytorch.tensor import utils

        self._cast, self._finish = utils.quantize_master_weights, utils.post_all_gather_processing
        self._entries, self._group = tuple(entries), group
        self._masters = [entry.source.view(-1) for entry in entries]
        quantizer = make_quantizer(entries[0].target.format)
        device = entries[0].source.device
        self._weights = [
            quantizer.make_empty(entry.target.shape[1:], dtype=torch.bfloat16, device=device)
            for entry in entries
        ]
        for weight in self._weights:
            for buffer in ("data", "scale_inv"):
                for direction in DIRECTIONS:
                    getattr(weight, f"_{direction}_{buffer}").view(torch.uint8).fill_(_POISON)

    def read(self, masters: Sequence[Tensor]) -> None:
        """Use ``masters``, one flat tensor per entry, in place of the entries' sources."""
        self._masters = [master.detach() for master in masters]

    def quantize(self) -> None:
        """Quantize the masters into the gathered buffers, as Megatron does after a step."""
        self._cast(
            self._weights,
            self._masters,
            [entry.start for entry in self._entries],
            self._group,
            manual_post_all_gather_processing=True,  # as Megatron 0.19 does
        )

    def finish_gather(self) -> None:
        """Derive the columnwise buffers from the rowwise ones."""
        self._finish(self._weights)

    def check_bytes(self, *, derived: bool) -> None:
        """Compare with the buffers of the entries; see :func:`check_bytes`."""
        check_bytes(self._entries, self._weights, derived=derived)


def check_bytes(entries: Sequence[TableEntry], weights: Sequence[Any], *, derived: bool) -> None:
    """Check that the owned part of every buffer has the same bytes on both sides.

    Args:
        entries: one expert each, written by us.
        weights: Transformer Engine's weights, in the same order.
        derived: whether to compare all buffers and the scales in storage, not only the gathered
            buffers.

    Raises:
        PatchError: a byte differs; the message names the buffer.
    """
    pairs = (
        pair
        for entry, weight in zip(entries, weights, strict=True)
        for pair in _pairs(entry, weight, derived)
    )
    require_same(pairs, entries[0].target.format.name)


def require_same(pairs: Iterable[tuple[str, Tensor, Tensor]], format: str) -> None:
    """Check that both tensors of each pair have the same bytes.

    ``pairs`` are name, our tensor, and Transformer Engine's. PatchError gives name and count of
    differing bytes.
    """
    counts: dict[str, tuple[Tensor, int]] = {}
    for name, ours, theirs in pairs:
        differing, size = counts.get(
            name, (torch.zeros((), dtype=torch.float32, device=ours.device), 0)
        )
        unequal = (_as_bytes(ours) != _as_bytes(theirs)).sum()
        counts[name] = (differing + unequal, size + ours.nbytes)
    for name, (differing, size) in counts.items():
        if differing:
            raise PatchError(
                f"{name}: expected the bytes of Transformer Engine, got {int(differing)} of {size} "
                f"that differ, in {format}. Times of work that is not the same are not compared; "
                "run the tests of the kernels."
            )


def _pairs(entry: TableEntry, weight: Any, derived: bool) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the name of each buffer, and the owned rows on both sides, without padding."""
    target = entry.target
    _, rows, cols = target.shape
    first, last = entry.start // cols, entry.end // cols

    def owned(buffer: Tensor) -> Tensor:
        return buffer[first * buffer.shape[0] // rows : last * buffer.shape[0] // rows]

    for name, stack in (target.buffers() if derived else target.gathered_buffers()).items():
        ours = stack[0]
        theirs = getattr(weight, f"_{name}".replace("scale", "scale_inv"))
        yield name, owned(ours), owned(theirs[: ours.shape[0], : ours.shape[1]])
    for direction, stored in entry.storage_scales.items() if derived else ():
        _, *blocks = target.format.scale_shape(target.shape, direction)
        lines = tuple(slice(size) for size in blocks)
        theirs = getattr(weight, f"_{direction}_scale_inv")
        yield f"{direction} scale in storage", stored[0][lines], theirs[lines]


def _as_bytes(buffer: Tensor) -> Tensor:
    return buffer.contiguous().view(torch.uint8)
