# mypy: allow-incomplete-defs

"""Triton helpers that update a tile of masters, by the rule of the launch.

RULE is ``adamw`` or ``adam``, an Adam step with decoupled or coupled weight decay; ``direction``, a
step along a given direction; or ``none`` in launches that only encode. Dtypes are ``fp32``,
``bf16``, ``fp16``, and ``none`` for the moments of a direction.
"""

import triton
import triton.language as tl

from moe_optim.kernels import fields
from moe_optim.kernels.adam import adam

STATE_FIELDS = tl.constexpr(fields.STATE_FIELDS)
HYPER_FIELDS = tl.constexpr(fields.HYPER_FIELDS)

# Columns of a row of states.
GRADIENT_PLACE = tl.constexpr(0)
EXP_AVG_PLACE = tl.constexpr(1)
EXP_AVG_SQ_PLACE = tl.constexpr(2)
GROUP = tl.constexpr(3)
CLIP = tl.constexpr(4)
WEIGHT_PLACE = tl.constexpr(5)


@triton.jit
def apply_direction(direction, master, hyper):
    """Return the fp32 masters after one step along a direction.

    ::

        o = (direction * scale) * extra    two products, each rounded
        p = p - (decay * lr) * p           not where decay * lr is 0
        p = p - lr * o

    Each difference is one ``fma.rn.f32``, which keeps subnormals. ``direction`` and ``master`` are
    fp32; ``hyper`` is a row of scalars.
    """
    _, _, minus_decay, minus_lr, scale, extra, _, _, _ = hyper
    if minus_decay != 0.0:  # 0 times infinity is NaN, and -0 plus 0 is 0
        master = tl.fma(minus_decay, master, master)
    return tl.fma(minus_lr, direction * scale * extra, master)


@triton.jit
def typed_pointer(place, first, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return a pointer to element ``first`` (int64) of the tensor whose address is at ``place``.

    ALIGNED hints that the tensor starts at a multiple of 16 bytes.
    """
    if DTYPE == "fp32":
        pointer = tl.load(place).to(tl.pointer_type(tl.float32))
    elif DTYPE == "bf16":
        pointer = tl.load(place).to(tl.pointer_type(tl.bfloat16))
    else:
        pointer = tl.load(place).to(tl.pointer_type(tl.float16))
    if ALIGNED:
        # Hint at most four elements: each thread then holds the same four of every tensor, and no
        # layout conversion is needed.
        pointer = tl.multiple_of(pointer, 16 if DTYPE == "fp32" else 8)
    return pointer + first


@triton.jit
def read_state(
    state,
    hyper,
    clips,
    first,
    RULE: tl.constexpr,
    GRADIENT: tl.constexpr,
    MOMENTS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Return the state that all updates of one program share; empty without a rule.

    It consists of pointers to element ``first`` (int64) of the gradient or direction and of both
    moments, the clip factor, and the hyper-parameters. ``state`` points to a row of states,
    ``hyper`` and ``clips`` to whole tables. ALIGNED hints that all tensors start at multiples of 16
    bytes. The compiler drops what the rule does not use.
    """
    read = ()
    if RULE != "none":
        gradient = typed_pointer(state + GRADIENT_PLACE, first, GRADIENT, ALIGNED)
        exp_avg = typed_pointer(state + EXP_AVG_PLACE, first, MOMENTS, ALIGNED)
        exp_avg_sq = typed_pointer(state + EXP_AVG_SQ_PLACE, first, MOMENTS, ALIGNED)
        clip = tl.load(clips + tl.load(state + CLIP))
        hyper += tl.load(state + GROUP) * HYPER_FIELDS
        row = (
            tl.load(hyper),
            tl.load(hyper + 1),
            tl.load(hyper + 2),
            tl.load(hyper + 3),
            tl.load(hyper + 4),
            tl.load(hyper + 5),
            tl.load(hyper + 6),
            tl.load(hyper + 7),
            tl.load(hyper + 8),
        )
        read = gradient, exp_avg, exp_avg_sq, clip, row  # type: ignore[assignment]
    return read


@triton.jit
def update_tile(source, places, mask, state, RULE: tl.constexpr):
    """Update a tile of elements: write masters and moments, and return the masters.

    ``places`` are int32 offsets from ``source``, the first master, and ``state`` is the result of
    :func:`read_state`. The result is zero outside ``mask``. A negative clip factor skips the
    update. Without a rule, the tile is only loaded.
    """
    if RULE == "none":
        return load_tile(source + places, mask)
    else:  # noqa: RET505 - Triton compiles code after a return
        gradient, exp_avg, exp_avg_sq, clip, hyper = state
        g = load_tile(gradient + places, mask).to(tl.float32)
        p = load_tile(source + places, mask).to(tl.float32)
        # a negative factor skips the update; masters are encoded again
        if RULE == "direction":
            if clip >= 0:
                p = apply_direction(g, p, hyper)
            tl.store(source + places, p, mask=mask)
        else:
            m = load_tile(exp_avg + places, mask).to(tl.float32)
            v = load_tile(exp_avg_sq + places, mask).to(tl.float32)
            if clip >= 0:
                p, m, v = adam(g, clip, p, m, v, hyper, RULE == "adamw")
            tl.store(source + places, p, mask=mask)
            tl.store(exp_avg + places, m.to(exp_avg.dtype.element_ty), mask=mask)
            tl.store(exp_avg_sq + places, v.to(exp_avg_sq.dtype.element_ty), mask=mask)
        return p if mask is None else tl.where(mask, p, 0.0)


@triton.jit
def load_tile(pointers, mask):
    """Load ``pointers``, with zeros outside ``mask``, which may be None."""
    return tl.load(pointers) if mask is None else tl.load(pointers, mask=mask, other=0.0)
