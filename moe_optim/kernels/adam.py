# mypy: allow-incomplete-defs

"""Triton helpers of an Adam step, bit-identical to Transformer Engine's FusedAdam.

Transformer Engine 2.20 compiles common/multi_tensor/adam.cu with fast math: FMA contraction,
approximate division and square root, subnormals flushed to zero. Inline PTX reproduces these
instructions; IEEE ones would change the last bit of one master in ten.
"""

import triton
import triton.language as tl

from moe_optim.kernels import fields

STATE_FIELDS = tl.constexpr(fields.STATE_FIELDS)
HYPER_FIELDS = tl.constexpr(fields.HYPER_FIELDS)

# Columns of a row of states.
GRADIENT_PLACE = tl.constexpr(0)
EXP_AVG_PLACE = tl.constexpr(1)
EXP_AVG_SQ_PLACE = tl.constexpr(2)
GROUP = tl.constexpr(3)
CLIP = tl.constexpr(4)
WEIGHT_PLACE = tl.constexpr(5)

_SCALE = """{
.reg .f32 g, a, b;
mul.rn.ftz.f32 g, $3, $4;
"""
_UPDATE = """mul.rn.ftz.f32 a, $9, g;
fma.rn.ftz.f32 $1, $8, $6, a;
mul.rn.ftz.f32 a, $11, g;
mul.rn.ftz.f32 a, a, g;
fma.rn.ftz.f32 $2, $10, $7, a;
div.approx.ftz.f32 a, $1, $12;
div.approx.ftz.f32 b, $2, $13;
sqrt.approx.ftz.f32 b, b;
add.rn.ftz.f32 b, b, $14;
div.approx.ftz.f32 a, a, b;
"""
_MOVE = """fma.rn.ftz.f32 $0, $16, a, $5;
}"""
_DECOUPLED = tl.constexpr(_SCALE + _UPDATE + "fma.rn.ftz.f32 a, $15, $5, a;\n" + _MOVE)
_COUPLED = tl.constexpr(_SCALE + "fma.rn.ftz.f32 g, $15, $5, g;\n" + _UPDATE + _MOVE)
_CONSTRAINTS = tl.constexpr("=&f,=&f,=&f,f,f,f,f,f,f,f,f,f,f,f,f,f,f")


@triton.jit
def adam(gradient, clip, master, exp_avg, exp_avg_sq, hyper, DECOUPLED: tl.constexpr):
    """Return the fp32 master and both moments after one step of Adam.

    ::

        g = clip * gradient                                      coupled: + decay * p
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + ((1 - beta2) * g) * g
        u = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)  decoupled: + decay * p
        p = p - lr * u

    Adam (Kingma and Ba, 2015); decoupled weight decay as in AdamW (Loshchilov and Hutter, 2019).
    All arguments are fp32; ``hyper`` is a row of scalars.
    """
    beta1, rest1, beta2, rest2, correction1, correction2, eps, decay, minus_lr = hyper
    return tl.inline_asm_elementwise(
        _DECOUPLED if DECOUPLED else _COUPLED,
        _CONSTRAINTS,
        [
            gradient,
            clip,
            master,
            exp_avg,
            exp_avg_sq,
            beta1,
            rest1,
            beta2,
            rest2,
            correction1,
            correction2,
            eps,
            decay,
            minus_lr,
        ],
        dtype=(tl.float32, tl.float32, tl.float32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def read_state(
    state,
    hyper,
    clips,
    first,
    GRADIENT_FP32: tl.constexpr,
    MOMENTS_FP32: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Return the state that all steps of one program share.

    It consists of pointers to the gradient and both moments of element ``first`` (int64), the clip
    factor, and the hyper-parameters. ``state`` points to a row of states, ``hyper`` and ``clips``
    to whole tables. ALIGNED hints that all tensors start at multiples of 16 bytes.
    """
    GRADIENT: tl.constexpr = tl.float32 if GRADIENT_FP32 else tl.bfloat16
    MOMENT: tl.constexpr = tl.float32 if MOMENTS_FP32 else tl.bfloat16
    gradient = tl.load(state + GRADIENT_PLACE).to(tl.pointer_type(GRADIENT))
    exp_avg = tl.load(state + EXP_AVG_PLACE).to(tl.pointer_type(MOMENT))
    exp_avg_sq = tl.load(state + EXP_AVG_SQ_PLACE).to(tl.pointer_type(MOMENT))
    if ALIGNED:
        # Hint at most four elements: each thread then holds the same four of every tensor, and no
        # layout conversion is needed.
        gradient = tl.multiple_of(gradient, 16 if GRADIENT_FP32 else 8)
        exp_avg = tl.multiple_of(exp_avg, 16 if MOMENTS_FP32 else 8)
        exp_avg_sq = tl.multiple_of(exp_avg_sq, 16 if MOMENTS_FP32 else 8)
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
    return gradient + first, exp_avg + first, exp_avg_sq + first, clip, row


@triton.jit
def step_tile(source, places, mask, state, DECOUPLED: tl.constexpr):
    """Step a tile of elements: write masters and moments, and return the masters.

    ``places`` are int32 offsets from ``source``, the first master, and ``state`` is the result of
    :func:`read_state`. The result is zero outside ``mask``. A negative clip factor skips the
    update.
    """
    gradient, exp_avg, exp_avg_sq, clip, hyper = state
    g = load_tile(gradient + places, mask).to(tl.float32)
    p = load_tile(source + places, mask).to(tl.float32)
    m = load_tile(exp_avg + places, mask).to(tl.float32)
    v = load_tile(exp_avg_sq + places, mask).to(tl.float32)
    if clip >= 0:  # a negative factor skips the update; masters are encoded again
        p, m, v = adam(g, clip, p, m, v, hyper, DECOUPLED)
    tl.store(source + places, p, mask=mask)
    tl.store(exp_avg + places, m.to(exp_avg.dtype.element_ty), mask=mask)
    tl.store(exp_avg_sq + places, v.to(exp_avg_sq.dtype.element_ty), mask=mask)
    return p if mask is None else tl.where(mask, p, 0.0)


@triton.jit
def load_tile(pointers, mask):
    """Load ``pointers``, with zeros outside ``mask``, which may be None."""
    return tl.load(pointers) if mask is None else tl.load(pointers, mask=mask, other=0.0)
