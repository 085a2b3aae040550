"""Newton-Schulz iterations in plain torch, and plans that run on given matrices."""

import math

import torch

from moe_optim.kernels.newton_schulz import NewtonSchulz, scratch_numel

QUINTIC = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
"""Coefficients of Megatron's default iteration."""

DEEPSEEK = ((3.4445, -4.7750, 2.0315),) * 8 + ((2.0, -1.5, 0.5),) * 2
"""Coefficients of DeepSeek-V4, ten steps."""


def random_matrices(shape, dtype, device="cpu", seed=0):
    """Return matrices of Frobenius norm 1."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (values / values.norm(dim=(1, 2), keepdim=True)).to(device, dtype)


def iterate(x, coefficients, *, transpose=None):
    """Return the iteration step by step, rounded as ``batched_newton_schulz_step`` rounds."""
    transpose = x.shape[1] > x.shape[2] if transpose is None else transpose
    x = x.mT if transpose else x
    for a, b, c in coefficients:
        gram = x @ x.mT
        factor = torch.baddbmm(gram, gram, gram, alpha=c, beta=b)
        x = torch.baddbmm(x, factor, x, beta=a)
    return (x.mT if transpose else x).contiguous()


def iterate_exactly(x, coefficients):
    """Return the iteration in fp64, [B, M, N] on the device of ``x``."""
    return iterate(x.double(), coefficients)


def orthogonalize(x, coefficients=QUINTIC, **options):
    """Return a plan that was launched once, and a copy of its result; scratch begins as NaN."""
    form = options.get("form", "plain")
    numel = scratch_numel(*x.shape, form=form, transpose=options.get("transpose"))
    scratch = torch.full((numel,), math.nan, dtype=x.dtype, device=x.device)
    built = NewtonSchulz.build(x, scratch, coefficients=coefficients, **options)
    built.launch()
    return built, built.result.clone()


def distance(got, want):
    """Return the relative distance from a result in fp64, the largest of all matrices."""
    error = (got.double() - want).norm(dim=(1, 2)) / want.norm(dim=(1, 2))
    return error.max().item()
