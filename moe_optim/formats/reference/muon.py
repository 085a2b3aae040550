"""One step of Muon on one shard, in plain torch: the definition of the fused step.

Momentum, orthogonalization, and update with decoupled weight decay, as in ``Muon`` of
emerging-optimizers 0.3.0 (orthogonalized_optimizers/orthogonalized_optimizer.py and muon.py),
whose torch operations are written out here, one rounding each::

    m = lerp(m, g, 1 - momentum)
    d = lerp(g, m, momentum)      with Nesterov's momentum, else m
    p = p - (decay * lr) * p
    p = p - lr * ((orthogonalize(d) * scale) * extra scale factor)

Products that are added to something round once together, a fused multiply-add: so do torch's
kernels on CPUs with AVX2 or AVX-512 (``Vectorized::fmadd``, and contraction by the compiler in the
remainder), and nvcc's contraction on a GPU. Nothing is flushed to zero.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_optim.formats.reference.arithmetic import fma


@dataclass(frozen=True, kw_only=True, slots=True)
class MuonHyper:
    """Hyper-parameters of a step, in fp32 as the kernels read them."""

    lr: float
    """Learning rate."""
    momentum: float
    """Decay rate of the momentum, 0 to 1."""
    weight_decay: float
    """Factor of the master that is subtracted, times the learning rate."""
    scale: float
    """Factor of the orthogonalized matrix, :meth:`Orthogonalization.scale`."""
    extra_scale_factor: float = 1.0
    """Second factor of the orthogonalized matrix."""

    def row(self) -> list[float]:
        """Return momentum, 1 - momentum, -(decay * lr), -lr, scale and extra scale factor.

        All are fp32 numbers, rounded once from fp64.
        """
        columns = [
            self.momentum,
            1 - self.momentum,
            -(self.weight_decay * self.lr),
            -self.lr,
            self.scale,
            self.extra_scale_factor,
        ]
        rounded: list[float] = torch.tensor(columns, dtype=torch.float32, device="cpu").tolist()
        return rounded


def momentum_into(
    gradient: Tensor, momentum: Tensor, *, hyper: Tensor, clip: Tensor, nesterov: bool
) -> Tensor:
    """Update the momentum in place and return what to orthogonalize, fp32 [n].

    Without Nesterov's momentum the result is ``momentum`` itself, not a copy.

    Args:
        gradient: reduced gradient, fp32 or bf16 [n], not modified.
        momentum: moving average of clipped gradients, fp32 [n].
        hyper: :meth:`MuonHyper.row`, fp32 [6].
        clip: factor of the gradient, fp32 scalar. A negative one skips the update; the result is
            then the momentum as it was, with and without Nesterov's momentum.
        nesterov: whether to return the average of gradient and new momentum.
    """
    if clip < 0:
        return momentum
    decay, rest = hyper[:2]
    g = gradient.float() * clip
    momentum.copy_(_lerp(momentum, g, rest))
    return _lerp(g, momentum, decay) if nesterov else momentum


def apply_into(master: Tensor, direction: Tensor, *, hyper: Tensor, clip: Tensor) -> None:
    """Decay the master and add the scaled direction, in place.

    A factor of decay of zero skips the decay. Where only the learning rate is zero,
    emerging-optimizers does not skip it, which turns a master of -0.0 into 0.0 and no other.

    Args:
        master: fp32 [n].
        direction: orthogonalized matrix, unscaled, fp32, bf16 or fp16 [n].
        hyper: :meth:`MuonHyper.row`, fp32 [6].
        clip: factor of the gradient, fp32 scalar; a negative one skips the update.
    """
    if clip < 0:
        return
    _, _, minus_decay, minus_lr, scale, extra = hyper
    p = master if minus_decay == 0 else fma(minus_decay, master, master)
    update = direction.float() * scale * extra
    master.copy_(fma(minus_lr, update, p))


def _lerp(start: Tensor, end: Tensor, weight: Tensor) -> Tensor:
    """Return ``torch.lerp`` with a scalar weight, which begins at the nearer of both ends.

    The formula is that of aten/src/ATen/native/Lerp.h. Below a weight of a half it is ``start +
    weight * (end - start)``, else ``end + (weight - 1) * (end - start)``. At a weight of exactly 1
    the sign of a zero may differ, which in torch depends on the place of the element.
    """
    if weight.abs() < 0.5:
        return fma(weight, end - start, start)
    return fma(weight - 1, end - start, end)
