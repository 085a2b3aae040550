"""What becomes of special values in one step of Adam: a table, derived by hand.

All of it is exact: both betas and the rate are a half, eps is one, nothing decays, and it is the
first step. So the moments become ``m / 2 + g / 2`` and ``v / 2 + g * g / 2``, and the update is
``2 m / (sqrt(2 v) + 1)``, of which a half is taken from the master.
"""

import math
from typing import NamedTuple

import torch

from moe_optim.formats.reference.adam import Hyper

LARGEST = torch.finfo(torch.float32).max
SMALLEST = 2.0**-126
"""The smallest normal number."""
SUBNORMAL = 2.0**-127
INF, NAN = math.inf, math.nan

HYPER = Hyper(lr=0.5, betas=(0.5, 0.5), eps=1.0, weight_decay=0.0, step=1)


class Values(NamedTuple):
    """Of one element."""

    master: float
    exp_avg: float
    exp_avg_sq: float


class Case(NamedTuple):
    """One element before and after a step."""

    before: Values
    gradient: float
    after: Values


def _case(before, gradient, after):
    return Case(Values(*before), gradient, Values(*after))


CASES = {
    "a gradient": _case((1, 0, 0), 3.0, (0.625, 1.5, 4.5)),
    "a zero": _case((1, 0, 0), 0.0, (1, 0, 0)),
    "a negative zero": _case((1, 0, 0), -0.0, (1, 0, 0)),
    "a master of zero": _case((0.0, 0, 0), 0.0, (0.0, 0, 0)),
    "a master of negative zero": _case((-0.0, 0, 0), 0.0, (-0.0, 0, 0)),
    "a subnormal gradient": _case((1, 0, 0), SUBNORMAL, (1, 0, 0)),
    "a subnormal master": _case((SUBNORMAL, 0, 0), 0.0, (0.0, 0, 0)),
    "a negative subnormal master": _case((-SUBNORMAL, 0, 0), 0.0, (-0.0, 0, 0)),
    "subnormal moments": _case((1, SUBNORMAL, SUBNORMAL), 0.0, (1, 0, 0)),
    "moments that become subnormal": _case((1, SMALLEST, SMALLEST), 0.0, (1, 0, 0)),
    "a negative one": _case((1, -SMALLEST, 0), 0.0, (1, -0.0, 0)),
    "moments that stay normal": _case(
        (1, 2 * SMALLEST, 2 * SMALLEST), 0.0, (1, SMALLEST, SMALLEST)
    ),
    "a square that vanishes": _case((0, 0, 0), 2.0**-64, (-(2.0**-65), 2.0**-65, 0)),
    "a square that overflows": _case((1, 0, 0), 2.0**65, (1, 2.0**64, INF)),
    "the largest gradient": _case((1, 0, 0), LARGEST, (1, LARGEST / 2, INF)),
    "the largest master": _case((LARGEST, 0, 0), 3.0, (LARGEST, 1.5, 4.5)),
    "the largest first moment": _case((1, LARGEST, 0), 0.0, (-LARGEST / 2, LARGEST / 2, 0)),
    "the largest second moment": _case((1, 0, LARGEST), 3.0, (1, 1.5, LARGEST / 2)),
    "an infinite gradient": _case((1, 0, 0), INF, (NAN, INF, INF)),
    "a negative infinite gradient": _case((1, 0, 0), -INF, (NAN, -INF, INF)),
    "an infinite first moment": _case((1, INF, 0), 3.0, (-INF, INF, 4.5)),
    "a negative infinite one": _case((1, -INF, 0), 3.0, (INF, -INF, 4.5)),
    "an infinite second moment": _case((1, 0, INF), 3.0, (1, 1.5, INF)),
    "a negative second moment": _case((1, 0, -18), 0.0, (NAN, 0, -9)),
    "a gradient of NaN": _case((1, 0, 0), NAN, (NAN, NAN, NAN)),
    "a first moment of NaN": _case((1, NAN, 0), 3.0, (NAN, NAN, 4.5)),
    "a second moment of NaN": _case((1, 0, NAN), 3.0, (NAN, 1.5, NAN)),
}
"""The same with either kind of decay."""

_NANS, _MOMENTS = (NAN, NAN, NAN), (NAN, 1.5, 4.5)
OF_DECAY = {
    "two negative zeros": ((1, -0.0, 0), -0.0, (1, -0.0, 0), (1, 0.0, 0)),
    "an infinite master": ((INF, 0, 0), 3.0, _MOMENTS, _NANS),
    "a negative infinite master": ((-INF, 0, 0), 3.0, _MOMENTS, _NANS),
    "a master of NaN": ((NAN, 0, 0), 3.0, _MOMENTS, _NANS),
}
"""What differs though the decay is zero: the product with the master is added to the update, so
that NaN spares the moments, or to the gradient, of which a negative zero becomes a positive one."""


def cases(*, decoupled: bool) -> dict[str, Case]:
    """Return the table for one kind of decay."""
    return CASES | {
        name: _case(before, gradient, apart if decoupled else added)
        for name, (before, gradient, apart, added) in OF_DECAY.items()
    }


def as_tensors(table: dict[str, Case]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return states before [3, n], gradients [n] and states after [3, n], fp32."""
    before, gradients, after = zip(*table.values(), strict=True)
    return (
        torch.tensor(before).T.contiguous(),
        torch.tensor(gradients),
        torch.tensor(after).T.contiguous(),
    )
