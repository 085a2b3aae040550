"""One step of Adam on one shard, in plain torch: the definition of the fused step.

The formula is that of Transformer Engine's FusedAdam (common/multi_tensor/adam.cu, 2.20) as
compiled: FMA contraction, and subnormals flushed to zero. Division and square root round to nearest
here, but only to within two units in the last place there, so one master in ten differs from the
GPU's in its last bit; moments are identical.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_optim.formats.reference.arithmetic import fma

_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, kw_only=True, slots=True)
class Hyper:
    """Hyper-parameters of a step, in fp32 as the kernels read them."""

    lr: float
    """Learning rate."""
    betas: tuple[float, float]
    """Decay rates of the first and the second moment."""
    eps: float
    """Term added to the square root of the corrected second moment."""
    weight_decay: float
    """Factor of the master that is added to the update or to the gradient."""
    step: int
    """Number of this update, from 1."""
    bias_correction: bool = True
    """Whether to correct the bias of the moments."""

    def row(self) -> list[float]:
        """Return beta1, 1 - beta1, beta2, 1 - beta2, both corrections, eps, decay and -lr.

        All are fp32 numbers. Corrections use fp64 powers of the rounded betas.
        """
        columns: list[float] = []
        betas = [_fp32(beta) for beta in self.betas]
        for beta in betas:
            columns += [beta, _fp32(1 - beta)]
        columns += [_fp32(1 - beta**self.step) if self.bias_correction else 1.0 for beta in betas]
        return [*columns, _fp32(self.eps), _fp32(self.weight_decay), -_fp32(self.lr)]


def step_into(
    master: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    hyper: Tensor,
    clip: Tensor,
    decoupled: bool,
) -> None:
    """Update a master and its moments in place.

    ::

        g = clip * gradient                                      coupled: + decay * p
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + ((1 - beta2) * g) * g
        u = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)  decoupled: + decay * p
        p = p - lr * u

    All tensors are [n], ``master`` fp32, gradient and moments fp32 or bf16; ``hyper`` is
    :meth:`Hyper.row`. A negative ``clip``, fp32 scalar, skips the update.
    """
    if clip < 0:
        return
    beta1, rest1, beta2, rest2, correction1, correction2, eps, decay, minus_lr = hyper
    p = _flush(master)
    g = _flush(_flush(gradient.float()) * clip)
    if not decoupled:
        g = _fma(decay, p, g)
    m = _fma(beta1, _flush(exp_avg.float()), _flush(rest1 * g))
    v = _fma(beta2, _flush(exp_avg_sq.float()), _flush(_flush(rest2 * g) * g))
    # via fp64 for round-to-nearest: torch's fp32 sqrt is off by one bit on some CPUs
    root = _flush(v / correction2).double().sqrt().float()
    update = _flush(_flush(m / correction1) / _flush(root + eps))
    if decoupled:
        update = _fma(decay, p, update)
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v)
    master.copy_(_fma(minus_lr, update, p))


def _fma(factor: Tensor, values: Tensor, addend: Tensor) -> Tensor:
    """Return ``factor * values + addend``, rounded once, with subnormals flushed."""
    return _flush(fma(factor, values, addend))


def _flush(values: Tensor) -> Tensor:
    """Flush subnormals to zero, keeping the sign."""
    return torch.where(values.abs() < _SMALLEST_NORMAL, values * 0.0, values)


def _fp32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32, device="cpu").item()
