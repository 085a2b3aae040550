from dataclasses import dataclass

import torch
from torch import Tensor

from moe_optim.kernels.plan import Plan


def scratch_numel(batch, rows, cols, *, form="plain", transpose=None):
    m = min(rows, cols) if transpose is None else (cols if transpose else rows)
    return 2 * batch * m * m + batch * rows * cols


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class NewtonSchulz(Plan):
    x: Tensor
    result: Tensor

    @classmethod
    def build(
        cls, x, scratch, *, coefficients, form="plain", transpose=None, reduce=None, backend="auto"
    ):
        def run():
            t = x.size(-2) > x.size(-1) if transpose is None else transpose
            X = x.mT if t else x
            for a, b, c in coefficients:
                A = X @ X.mT
                if reduce:
                    reduce(A)
                B = torch.baddbmm(A, A, A, alpha=c, beta=b)
                X = torch.baddbmm(X, B, X, alpha=1.0, beta=a)
            x.copy_(X.mT if t else X)

        return cls(device=x.device, calls=(run,), x=x, result=x)
