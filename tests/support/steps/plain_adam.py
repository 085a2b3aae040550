"""Adam of one step on one shard as Transformer Engine publishes it, written anew.

``common/multi_tensor/adam.cu`` of 2.20, as its compiler contracts it: a product that is added to
something is not rounded, and subnormals count as zero, with their sign. Of what is tested, nothing
is used. Products of two fp32 numbers are whole in numpy's ``longdouble``, and sums go to the nearer
of two fp32 numbers.
"""

import numpy as np
import torch

Array = np.ndarray
Shard = dict[str, torch.Tensor]
"""``master``, ``exp_avg`` and ``exp_avg_sq``."""


def adam_step(
    before: Shard,
    gradient: torch.Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    clip: float,
    decoupled: bool,
) -> Shard:
    """Return master and moments after a step, each in its own dtype.

    Args:
        before: master [n] fp32; moments [n] fp32 or bf16.
        gradient: [n] fp32 or bf16.
        lr: learning rate.
        betas: of the first and of the second moment.
        eps: added to the root.
        weight_decay: factor of the master.
        step: of this update, from 1 on.
        clip: fp32 number that the gradient is multiplied by.
        decoupled: AdamW; else decay is added to the gradient.
    """
    p, m, v, g = (
        _ftz(tensor.float().numpy())
        for tensor in (before["master"], before["exp_avg"], before["exp_avg_sq"], gradient)
    )
    b1, b2 = (np.float32(beta) for beta in betas)
    c1, c2 = (np.float32(1 - float(beta) ** step) for beta in (b1, b2))
    one, decay = np.float32(1), np.float32(weight_decay)
    g = _ftz(g * np.float32(clip))
    if not decoupled:
        g = _fma(decay, p, g)
    m = _fma(b1, m, _ftz((one - b1) * g))
    v = _fma(b2, v, _ftz(_ftz((one - b2) * g) * g))
    update = _ftz(_ftz(m / c1) / _ftz(np.sqrt(_ftz(v / c2)) + np.float32(eps)))
    if decoupled:
        update = _fma(decay, p, update)
    p = _fma(-np.float32(lr), update, p)
    after = {"master": p, "exp_avg": m, "exp_avg_sq": v}
    return {name: torch.from_numpy(one).to(before[name].dtype) for name, one in after.items()}


def _fma(factor: np.float32, values: Array, addend: Array) -> Array:
    """Return ``factor * values + addend``, of the two fp32 neighbours of the sum the nearer one.

    The sum itself is rounded, too, so what it lacks is added where it lies between the two.
    """
    product, addend = np.longdouble(factor) * values, addend.astype(np.longdouble)
    with np.errstate(over="ignore", invalid="ignore"):
        total = product + addend
        added = total - product
        lacks = (product - (total - added)) + (addend - added)
        near = total.astype(np.float32)
        way = np.sign(total - near).astype(np.float32)
        beside = np.nextafter(near, way * np.float32(np.inf), where=way != 0, out=near.copy())
        half = (beside.astype(np.longdouble) - near) / 2
        is_nearer = way * (total - near - half + lacks) > 0
    return _ftz(np.where(is_nearer, beside, near))


def _ftz(values: Array) -> Array:
    return np.where(np.abs(values) < np.finfo(np.float32).tiny, np.copysign(0, values), values)
