"""Maxima that several ranks contribute to, and their slots in the reduced tensor."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moe_optim.errors import LayoutError
from moe_optim.formats import BlockScaledFormat

AMAX_SLOTS = 64
"""Slots for the amax of one expert: the most programs that compute it, one slot each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """Shared maxima of one weight: equal on all ranks, since they follow from shapes and cuts."""

    block_rows: Mapping[tuple[int, int], int]
    """Map from (expert, first row) of each cut block row to its first slot."""
    experts: Mapping[int, int]
    """Map from each expert on several ranks to the first of its ``AMAX_SLOTS``; empty for formats
    without a global amax."""
    first: int
    size: int
    """Number of slots of this weight, starting at ``first``."""


def plan_exchange(
    format: BlockScaledFormat,
    shape: tuple[int, int, int],
    cuts: Sequence[int],
    *,
    first: int = 0,
    shares_experts: bool = False,
    name: str = "weight",
) -> Exchange:
    """Return the maxima that the owners of a weight exchange before any of them can encode.

    Args:
        format: storage format.
        shape: [E, R, C].
        cuts: elements of the weight at which the ranges of two ranks meet, in any order.
        first: number of slots that other weights use before this one.
        shares_experts: whether every expert continues in weights of other ranks.
        name: parameter name, for errors.
    """
    experts, rows, cols = shape
    numel, block_row = rows * cols, format.block_row_height * cols
    block_rows: dict[tuple[int, int], int] = {}
    global_amaxes: dict[int, int] = {}
    slot = first
    if shares_experts and format.has_global_amax:
        global_amaxes = {expert: first + AMAX_SLOTS * expert for expert in range(experts)}
        slot += AMAX_SLOTS * experts
    for cut in sorted(set(cuts)):
        if not 0 < cut < experts * numel or cut % format.elements_per_byte:
            raise LayoutError(
                f"{name}: expected cuts inside of {list(shape)} and at multiples of "
                f"{format.elements_per_byte}, got {cut}. Leave out where the weight itself begins "
                "or ends, and pad the bucket so that every shard has whole bytes."
            )
        expert, offset = divmod(cut, numel)
        key = (expert, offset // block_row * format.block_row_height)
        if offset % block_row and key not in block_rows:
            block_rows[key] = slot
            # C columns and C / block runs in each of `block` rows, or one per square block
            both_ways = len(format.gathered_directions) == 2
            slot += 2 * cols if both_ways else -(-cols // format.block_length)
        if format.has_global_amax and offset and expert not in global_amaxes:
            global_amaxes[expert] = slot
            slot += AMAX_SLOTS
    return Exchange(block_rows=block_rows, experts=global_amaxes, first=first, size=slot - first)
