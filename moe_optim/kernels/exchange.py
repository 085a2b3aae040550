"""Which maxima several ranks contribute to, and where they lie in the tensor that is reduced."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moe_optim.errors import LayoutError
from moe_optim.formats import BlockScaledFormat

AMAX_SLOTS = 64
"""Slots of the amax of one expert: as many programs find it, and each fills one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """Shared maxima of one weight. Equal on all ranks, because it follows from shapes and cuts."""

    bands: Mapping[tuple[int, int], int]
    """(expert, first row) of every band that a cut runs through -> first of its block maxima."""
    experts: Mapping[int, int]
    """Expert that several ranks own of -> first of its ``AMAX_SLOTS``; formats with a global amax.
    """
    first: int
    size: int
    """Slots of this weight, from ``first`` on."""


def plan_exchange(
    format: BlockScaledFormat,
    shape: tuple[int, int, int],
    cuts: Sequence[int],
    *,
    first: int = 0,
    shares_experts: bool = False,
    name: str = "weight",
) -> Exchange:
    """Return what the owners of a weight have to exchange before any of them can encode.

    Args:
        format: storage format.
        shape: [E, R, C].
        cuts: elements of the weight at which the range of one rank ends and that of the next one
            begins; all ranks', in any order.
        first: slots that other weights take before this one.
        shares_experts: whether every expert goes on in weights of other ranks.
        name: parameter, for errors.

    Raises:
        LayoutError: a cut that is not inside of the weight, or that divides a byte.
    """
    experts, rows, cols = shape
    numel, band = rows * cols, format.band_rows * cols
    bands: dict[tuple[int, int], int] = {}
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
        key = (expert, offset // band * format.band_rows)
        if offset % band and key not in bands:
            bands[key] = slot
            slot += band_slots(format, cols)
        if format.has_global_amax and offset and expert not in global_amaxes:
            global_amaxes[expert] = slot
            slot += AMAX_SLOTS
    return Exchange(bands=bands, experts=global_amaxes, first=first, size=slot - first)


def band_slots(format: BlockScaledFormat, cols: int) -> int:
    """Return how many maxima a band has: of its C columns and C runs, or of its square blocks."""
    return -(-cols // format.rowwise_block[1]) if format.is_2d else 2 * cols
