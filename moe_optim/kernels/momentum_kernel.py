# mypy: allow-incomplete-defs

"""Kernels before and after the Newton-Schulz iteration: momentum, packing and unpacking.

Arithmetic is fp32 rounded to nearest, subnormals included. ``lerp`` is that of PyTorch 2.11
(ATen/native/Lerp.h) as compiled, with a fused multiply-add.
"""

import triton
import triton.language as tl

from moe_optim.kernels import fields
from moe_optim.kernels.update_tile import load_tile

HYPER_FIELDS = tl.constexpr(fields.HYPER_FIELDS)
MATRIX_FIELDS = tl.constexpr(fields.MATRIX_FIELDS)
MATRIX_PART_FIELDS = tl.constexpr(fields.MATRIX_PART_FIELDS)

# Columns of a matrix.
GRADIENT_ADDRESS = tl.constexpr(0)
MOMENTUM_ADDRESS = tl.constexpr(1)
SPAN = tl.constexpr(2)
GAP = tl.constexpr(3)
HYPER_ROW = tl.constexpr(4)
CLIP_INDEX = tl.constexpr(5)
PACKED_ADDRESS = tl.constexpr(6)
SQUARE_INDEX = tl.constexpr(7)

SMALLEST_NORM = tl.constexpr(1e-7)


@triton.jit
def momentum_kernel(
    matrices,  # [num_matrices, MATRIX_FIELDS] int64, see fields.py
    parts,  # [num_parts, MATRIX_PART_FIELDS] int64
    hyper,  # [num_groups, HYPER_FIELDS] fp32: momentum, 1 - momentum, ...
    clips,  # [num_norms] fp32
    sums,  # [num_slots] fp64
    GRADIENT_FP32: tl.constexpr,
    NESTEROV: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Update the momentum of one part, and write the fp64 sum of squares of its direction.

    ::

        g = clip * gradient
        m = lerp(m, g, 1 - momentum)
        u = lerp(g, m, momentum)      without Nesterov: m

    Grid (num_parts,). With a negative clip factor u is m, which does not change. Lane i adds the
    squares of elements i, i + TILE, ... of the part in this order, then neighbouring lanes are
    added.
    """
    part = parts + tl.program_id(0).to(tl.int64) * MATRIX_PART_FIELDS
    row = matrices + tl.load(part) * MATRIX_FIELDS
    where = _read_places(part, row, CONTIGUOUS, ALIGNED)
    gradient = _gradient(row, GRADIENT_FP32, ALIGNED)
    momentum = _memory_at(row + MOMENTUM_ADDRESS, tl.float32, 16, ALIGNED)
    state = (gradient, momentum, _read_factors(row, hyper, clips))
    count = tl.load(part + 3).to(tl.int32)
    whole = count - count % TILE
    squares = tl.zeros((TILE,), dtype=tl.float64)
    for start in range(0, whole, TILE):  # unmasked: widest accesses
        places = _places(where, start, CONTIGUOUS, TILE)
        squares = _update_tile(state, places, None, squares, NESTEROV)
    if whole < count:
        inside = tl.arange(0, TILE) < count - whole
        places = _places(where, whole, CONTIGUOUS, TILE)
        squares = _update_tile(state, places, inside, squares, NESTEROV)
    tl.store(sums + tl.load(part + 4), _add_neighbours(squares, TILE))


@triton.jit
def _update_tile(state, places, mask, squares, NESTEROV: tl.constexpr):
    """Update a tile of momentum, and return the squares with those of the direction added."""
    gradient, momentum, factors = state
    clip, decay, rest = factors
    g = _clipped(load_tile(gradient + places, mask), clip)
    old = load_tile(momentum + places, mask)
    new = tl.where(clip < 0, old, _lerp(old, g, rest))
    tl.store(momentum + places, new, mask=mask)
    direction = new
    if NESTEROV:
        direction = tl.where(clip < 0, old, _lerp(g, new, decay))
    wide = direction.to(tl.float64)  # zero outside the mask
    return squares + wide * wide  # exact squares: FMA or not, same bits


@triton.jit
def add_squares_kernel(
    bounds,  # [num_matrices + 1] int64
    sums,  # [num_slots] fp64
    squares,  # [num_matrices] fp64
    LANES: tl.constexpr,
):
    """Add the part sums of one matrix, in the order of ``momentum_kernel``.

    Grid (num_matrices,).
    """
    matrix = tl.program_id(0)
    lanes = tl.arange(0, LANES)
    end = tl.load(bounds + matrix + 1)
    total = tl.zeros((LANES,), dtype=tl.float64)
    for start in range(tl.load(bounds + matrix), end, LANES):
        total += tl.load(sums + start + lanes, mask=start + lanes < end, other=0.0)
    tl.store(squares + matrix, _add_neighbours(total, LANES))


@triton.jit
def pack_kernel(
    matrices,  # [num_matrices, MATRIX_FIELDS] int64, see fields.py
    parts,  # [num_parts, MATRIX_PART_FIELDS] int64
    hyper,  # [num_groups, HYPER_FIELDS] fp32: momentum, 1 - momentum, ...
    clips,  # [num_norms] fp32
    squares,  # [num_squares] fp64
    packed,  # [num_matrices, M, N], for its dtype
    GRADIENT_FP32: tl.constexpr,
    NESTEROV: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the direction of one part, divided by the Frobenius norm of its matrix.

    ::

        u = lerp(clip * gradient, m, momentum)      without Nesterov: m, the updated momentum
        x = u / max(sqrt(sum of u^2), 1e-7)

    Grid (num_parts,). With a negative clip factor u is m.
    """
    part = parts + tl.program_id(0).to(tl.int64) * MATRIX_PART_FIELDS
    row = matrices + tl.load(part) * MATRIX_FIELDS
    where = _read_places(part, row, CONTIGUOUS, ALIGNED)
    gradient = _gradient(row, GRADIENT_FP32, ALIGNED)
    momentum = _memory_at(row + MOMENTUM_ADDRESS, tl.float32, 16, ALIGNED)
    state = (gradient, momentum, _read_factors(row, hyper, clips))
    multiple: tl.constexpr = 16 if packed.dtype.element_ty == tl.float32 else 8
    target = _packed(part, row, packed, multiple, ALIGNED)  # four elements, as of momentum
    norm = tl.sqrt(tl.load(squares + tl.load(row + SQUARE_INDEX))).to(tl.float32)
    norm = tl.where(norm < SMALLEST_NORM, SMALLEST_NORM, norm)  # keeps NaN
    count = tl.load(part + 3).to(tl.int32)
    whole = count - count % TILE
    lanes = tl.arange(0, TILE)
    for start in range(0, whole, TILE):  # unmasked: widest accesses
        places = _places(where, start, CONTIGUOUS, TILE)
        _divide(state, places, target + start + lanes, None, norm, NESTEROV)
    if whole < count:
        places = _places(where, whole, CONTIGUOUS, TILE)
        _divide(state, places, target + whole + lanes, lanes < count - whole, norm, NESTEROV)


@triton.jit
def _divide(state, places, target, mask, norm, NESTEROV: tl.constexpr):
    """Write a tile of directions, divided by the norm."""
    gradient, momentum, factors = state
    clip, decay, _ = factors
    direction = load_tile(momentum + places, mask)
    if NESTEROV:
        g = _clipped(load_tile(gradient + places, mask), clip)
        direction = tl.where(clip < 0, direction, _lerp(g, direction, decay))
    values = tl.div_rn(direction, norm)
    tl.store(target, values.to(target.dtype.element_ty), mask=mask)


@triton.jit
def unpack_kernel(
    matrices,  # [num_matrices, MATRIX_FIELDS] int64: weights in place of momentum
    parts,  # [num_parts, MATRIX_PART_FIELDS] int64
    packed,  # [num_matrices, M, N], for its dtype
    CONTIGUOUS: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Copy one part of a packed matrix to its rows of the weight; grid (num_parts,)."""
    part = parts + tl.program_id(0).to(tl.int64) * MATRIX_PART_FIELDS
    row = matrices + tl.load(part) * MATRIX_FIELDS
    where = _read_places(part, row, CONTIGUOUS, ALIGNED)
    source = _packed(part, row, packed, 16, ALIGNED)
    target = _memory_at(row + MOMENTUM_ADDRESS, packed.dtype.element_ty, 16, ALIGNED)
    count = tl.load(part + 3).to(tl.int32)
    whole = count - count % TILE
    lanes = tl.arange(0, TILE)
    for start in range(0, whole, TILE):  # unmasked: widest accesses
        values = tl.load(source + start + lanes)
        tl.store(target + _places(where, start, CONTIGUOUS, TILE), values)
    if whole < count:
        inside = lanes < count - whole
        values = tl.load(source + whole + lanes, mask=inside)
        tl.store(target + _places(where, whole, CONTIGUOUS, TILE), values, mask=inside)


@triton.jit
def _read_places(part, row, CONTIGUOUS: tl.constexpr, ALIGNED: tl.constexpr):
    """Return what places of a part depend on: first, elements of a group and of the gap behind."""
    first = tl.load(part + (2 if CONTIGUOUS else 1)).to(tl.int32)
    span = tl.load(row + SPAN).to(tl.int32)
    gap = tl.load(row + GAP).to(tl.int32)
    if ALIGNED:
        first = tl.multiple_of(first, 16)
        span = tl.multiple_of(span, 16)
        gap = tl.multiple_of(gap, 16)
    return first, span, gap


@triton.jit
def _places(where, start, CONTIGUOUS: tl.constexpr, TILE: tl.constexpr):
    """Return the places in memory of a tile, counted from the first element of the matrix."""
    first, span, gap = where
    places = first + start + tl.arange(0, TILE)
    return places if CONTIGUOUS else places + places // span * gap


@triton.jit
def _read_factors(row, hyper, clips):
    """Return the clip factor, the momentum and 1 - momentum of a matrix."""
    hyper += tl.load(row + HYPER_ROW) * HYPER_FIELDS
    return tl.load(clips + tl.load(row + CLIP_INDEX)), tl.load(hyper), tl.load(hyper + 1)


@triton.jit
def _gradient(row, FP32: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the pointer to the gradient; each thread holds four elements, as of momentum."""
    return _memory_at(
        row + GRADIENT_ADDRESS, tl.float32 if FP32 else tl.bfloat16, 16 if FP32 else 8, ALIGNED
    )


@triton.jit
def _packed(part, row, packed, MULTIPLE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the pointer to the first packed element of a part."""
    memory = _memory_at(row + PACKED_ADDRESS, packed.dtype.element_ty, 1, False) + tl.load(part + 1)
    if ALIGNED:
        memory = tl.multiple_of(memory, MULTIPLE)
    return memory


@triton.jit
def _memory_at(address, DTYPE: tl.constexpr, MULTIPLE: tl.constexpr, ALIGNED: tl.constexpr):
    """Load the pointer stored at an address."""
    memory = tl.load(address).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        memory = tl.multiple_of(memory, MULTIPLE)
    return memory


@triton.jit
def _clipped(gradient, clip):
    """Return clip * gradient in fp32, rounded before it is subtracted from anything."""
    return tl.inline_asm_elementwise(
        "mul.rn.f32 $0, $1, $2;",
        "=f,f,f",
        [gradient.to(tl.float32), clip],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _lerp(start, end, weight):
    """Return start + weight * (end - start), from the nearer end, rounded after each sum."""
    small = tl.abs(weight) < 0.5
    factor = tl.where(small, weight, weight - 1.0)
    return tl.fma(end - start, factor, tl.where(small, start, end))


@triton.jit
def _add_neighbours(values, LANES: tl.constexpr):
    """Return the sum of a power of two of lanes: of neighbours, then of neighbouring sums.

    Sums of two are the same in every layout of registers, which depends on alignment.
    """
    for _ in tl.static_range(LANES.bit_length() - 1):
        values = tl.sum(tl.reshape(values, (values.shape[0] // 2, 2)), 1)
    return tl.sum(values, 0)
