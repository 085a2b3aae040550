# mypy: allow-incomplete-defs

"""Triton helpers of an Adam step, bit-identical to Transformer Engine's FusedAdam.

Transformer Engine 2.20 compiles common/multi_tensor/adam.cu with fast math: FMA contraction,
approximate division and square root, subnormals flushed to zero. Inline PTX reproduces these
instructions; IEEE ones would change the last bit of one master in ten.
"""

import triton
import triton.language as tl

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
