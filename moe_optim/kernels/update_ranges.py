# mypy: allow-incomplete-defs

"""Updates of flat ranges: dense weights, cut block rows, and experts whose amax comes first."""

import triton
import triton.language as tl

from moe_optim.kernels.encode import round_to_bf16
from moe_optim.kernels.update_tile import (
    STATE_FIELDS,
    WEIGHT_PLACE,
    read_state,
    typed_pointer,
    update_tile,
)


@triton.jit
def update_ranges_kernel(
    states,  # [num_ranges, STATE_FIELDS] int64, see fields.py
    masters,  # [num_ranges] int64: address of the first master
    parts,  # [num_parts, 4] int64: range, first element, end element, slot
    hyper,  # [num_groups, HYPER_FIELDS] fp32
    clips,  # [num_norms] fp32
    amaxes,  # [num_slots] fp32
    TILE: tl.constexpr,
    RULE: tl.constexpr,
    GRADIENT: tl.constexpr,
    MOMENTS: tl.constexpr,
    ALIGNED: tl.constexpr,
    WEIGHTS: tl.constexpr,
    AMAX: tl.constexpr,
):
    """Update one part of one range, see ``update_tile``.

    Grid (num_parts,). WEIGHTS, "bf16" or "fp32", also writes the new masters to the weight of the
    range. AMAX writes their amax, rounded to bf16, to the slot of the part.
    """
    part = parts + 4 * tl.program_id(0).to(tl.int64)
    index = tl.load(part)
    first = tl.load(part + 1)
    length = (tl.load(part + 2) - first).to(tl.int32)
    master = tl.load(masters + index).to(tl.pointer_type(tl.float32))
    if ALIGNED:
        master = tl.multiple_of(master, 16)
        first = tl.multiple_of(first, 16)
    master += first
    row = states + index * STATE_FIELDS
    state = read_state(row, hyper, clips, first, RULE, GRADIENT, MOMENTS, ALIGNED)
    weight = master
    if WEIGHTS != "none":
        weight = typed_pointer(row + WEIGHT_PLACE, first, WEIGHTS, False)
    largest = tl.zeros((TILE,), dtype=tl.float32)
    places = tl.arange(0, TILE)
    whole = length - length % TILE
    for start in range(0, whole, TILE):  # unmasked: widest accesses
        largest = _update(master, weight, start + places, None, state, largest, RULE, WEIGHTS)
    if whole < length:
        places += whole
        mask = places < length
        largest = _update(master, weight, places, mask, state, largest, RULE, WEIGHTS)
    if AMAX:
        tl.store(amaxes + tl.load(part + 3), round_to_bf16(tl.max(largest, 0)))


@triton.jit
def _update(
    master, weight, places, mask, state, largest, RULE: tl.constexpr, WEIGHTS: tl.constexpr
):
    """Update a tile, and return the running maximum of magnitudes per lane."""
    value = update_tile(master, places, mask, state, RULE)
    if WEIGHTS != "none":
        tl.store(weight + places, value.to(weight.dtype.element_ty), mask=mask)
    return tl.maximum(largest, tl.abs(value))  # ignores NaN
