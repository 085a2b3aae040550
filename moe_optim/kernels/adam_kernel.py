# mypy: allow-incomplete-defs

"""Adam over flat ranges: dense weights, cut block rows, and experts that need an amax to encode."""

import triton
import triton.language as tl

from moe_optim.kernels.adam import STATE_FIELDS, WEIGHT_PLACE, read_state, step_tile
from moe_optim.kernels.encode import round_to_bf16


@triton.jit
def adam_kernel(
    states,  # [num_ranges, STATE_FIELDS] int64, see fields.py
    masters,  # [num_ranges] int64: address of the first master
    parts,  # [num_parts, 4] int64: range, first element, end element, slot
    hyper,  # [num_groups, HYPER_FIELDS] fp32
    clips,  # [num_norms] fp32
    amaxes,  # [num_slots] fp32
    TILE: tl.constexpr,
    GRADIENT_FP32: tl.constexpr,
    MOMENTS_FP32: tl.constexpr,
    DECOUPLED: tl.constexpr,
    ALIGNED: tl.constexpr,
    WEIGHTS: tl.constexpr,
    AMAX: tl.constexpr,
):
    """Step one part of one range, see ``adam.adam``.

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
    state = read_state(row, hyper, clips, first, GRADIENT_FP32, MOMENTS_FP32, ALIGNED)
    weight = master
    if WEIGHTS == "bf16":
        weight = tl.load(row + WEIGHT_PLACE).to(tl.pointer_type(tl.bfloat16)) + first
    elif WEIGHTS == "fp32":
        weight = tl.load(row + WEIGHT_PLACE).to(tl.pointer_type(tl.float32)) + first
    largest = tl.zeros((TILE,), dtype=tl.float32)
    places = tl.arange(0, TILE)
    whole = length - length % TILE
    for start in range(0, whole, TILE):  # unmasked: widest accesses
        largest = _step(master, weight, start + places, None, state, largest, DECOUPLED, WEIGHTS)
    if whole < length:
        places += whole
        mask = places < length
        largest = _step(master, weight, places, mask, state, largest, DECOUPLED, WEIGHTS)
    if AMAX:
        tl.store(amaxes + tl.load(part + 3), round_to_bf16(tl.max(largest, 0)))


@triton.jit
def _step(
    master, weight, places, mask, state, largest, DECOUPLED: tl.constexpr, WEIGHTS: tl.constexpr
):
    """Step a tile, and return the running maximum of magnitudes per lane."""
    value = step_tile(master, places, mask, state, DECOUPLED)
    if WEIGHTS != "none":
        tl.store(weight + places, value.to(weight.dtype.element_ty), mask=mask)
    return tl.maximum(largest, tl.abs(value))  # ignores NaN
