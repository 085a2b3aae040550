"""Newton-Schulz iteration over batches of matrices, as Muon orthogonalizes them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, cycle
from typing import Literal

import torch
from torch import Tensor

from moe_optim.kernels.cutting import Carver
from moe_optim.kernels.plan import ALIGNMENT, Backend, Call, Plan
from moe_optim.kernels.products import evaluate, multiply, serves_products

Form = Literal["plain", "gram"]
"""Form of the iteration: ``plain`` multiplies X at every step, ``gram`` works on X X^T."""

Coefficients = tuple[float, float, float]
"""Coefficients (a, b, c) of a step."""

GRAM_SPAN = 3
"""Steps of the Gram form between two restarts, which compute X and X X^T anew. Rounding errors of
X X^T grow with every step: without a restart after step 5, ten steps in fp16 end in NaN."""

_NUM_SQUARES = {"plain": 2, "gram": 4}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class NewtonSchulz(Plan):
    """Plan that orthogonalizes a batch of matrices. See :meth:`build`.

    On GPUs of compute capability 9.0, kernels multiply matrices of bf16 and fp16 whose rows and
    columns are multiples of 8. Their symmetric products are symmetric to the bit, and the result of
    a matrix depends neither on the number of matrices nor on its position among them. Everything
    else runs ``torch.baddbmm``, for fp32 with TF32 if the caller allows it at launch.
    """

    x: Tensor
    """Normalized matrices, [B, M, N] bf16, fp16 or fp32; a launch overwrites them."""
    result: Tensor
    """Orthogonalized matrices after a launch, [B, M, N]; ``x`` itself, or part of scratch."""

    @classmethod
    def build(
        cls,
        x: Tensor,
        scratch: Tensor,
        *,
        coefficients: Sequence[Coefficients],
        form: Form = "plain",
        transpose: bool | None = None,
        reduce: Callable[[Tensor], object] | None = None,
        backend: Backend = "auto",
    ) -> "NewtonSchulz":
        """Plan an iteration, without copying.

        A step computes A = X X^T, B = b A + c A A, and X = a X + B X; transposed, A = X^T X and
        X = a X + X B. A, B and X are rounded to the dtype of ``x``, as in emerging-optimizers.
        Kernels compute B = a I + b A + c A A and X = B X instead, which reads X once less.

        ``x`` are normalized matrices, [B, M, N] bf16, fp16 or fp32, contiguous and not empty;
        ``scratch`` is flat memory of the same dtype, of :func:`scratch_numel` elements or more. A
        form ``gram`` has fewer products with X, and bf16 is too coarse for it. ``transpose`` is by
        default true if a matrix has more rows than columns. ``reduce`` sums A, [B, m, m], over
        ranks in place, where each holds a slice of every matrix; with ``plain`` only.
        """
        is_tall = x.shape[1] > x.shape[2] if transpose is None else transpose
        takes = serves_products(backend, x, scratch) and all(c for _, _, c in coefficients)
        other, *squares = _carve(scratch, x.shape, form, is_tall)
        views = _view_wide(x, other, is_tall, takes)
        if form == "plain":
            calls, last = _iterate_plain(views, squares, coefficients, reduce, kernels=takes)
        else:
            calls, last = _iterate_gram(views, squares, coefficients, kernels=takes)
        result, spare = (x, other) if last.data_ptr() == x.data_ptr() else (other, x)
        if is_tall and not takes:
            calls.append(partial(spare.copy_, last.mT))
            result = spare
        return cls(device=x.device, calls=tuple(calls), x=x, result=result)


def scratch_numel(
    batch: int, rows: int, cols: int, *, form: Form, transpose: bool | None = None
) -> int:
    """Return the elements of scratch that a batch of matrices needs, [batch, rows, cols].

    They hold the matrices once more, and two batches of squares as large as A, or four with
    ``gram``.
    """
    is_tall = rows > cols if transpose is None else transpose
    side = cols if is_tall else rows
    return _pad(batch * rows * cols) + _NUM_SQUARES[form] * _pad(batch * side * side)


def _view_wide(x: Tensor, other: Tensor, is_tall: bool, takes: bool) -> Iterator[Tensor]:
    """Yield the wide matrices of ``x``, then the memory of every new X.

    Plain torch transposes tall matrices in the end rather than in every product, since a CPU rounds
    products by their layouts: so their bits are those of emerging-optimizers.
    """
    if not is_tall:
        return cycle((x, other))
    if takes:
        return cycle((x.mT, other.mT))
    shape = x.mT.shape
    return chain((x.mT,), cycle((other.view(shape), x.view(shape))))


def _iterate_plain(
    views: Iterator[Tensor],
    squares: Sequence[Tensor],
    coefficients: Sequence[Coefficients],
    reduce: Callable[[Tensor], object] | None,
    *,
    kernels: bool,
) -> tuple[list[Call], Tensor]:
    """Return all calls, and the tensor that holds the result."""
    gram, factor = squares
    x = next(views)
    calls: list[Call] = []
    for a, b, c in coefficients:
        new = next(views)
        calls.append(multiply(x, x.mT, gram, kernels=kernels, is_symmetric=True))
        if reduce is not None:
            calls.append(partial(reduce, gram))
        in_factor, plus = (a, 0.0) if kernels else (0.0, a)
        calls.append(evaluate(gram, factor, (in_factor, b, c), kernels=kernels))
        calls.append(multiply(factor, x, new, kernels=kernels, plus=plus))
        x = new
    return calls, x


def _iterate_gram(
    views: Iterator[Tensor],
    squares: Sequence[Tensor],
    coefficients: Sequence[Coefficients],
    *,
    kernels: bool,
) -> tuple[list[Call], Tensor]:
    """Return all calls, and the tensor that holds the result.

    With R = X X^T and W = a I + b R + c R R, X becomes W X and R becomes W R W. Factors W are
    multiplied with each other, and with X before a restart and in the end (Gram Newton-Schulz,
    Dao-AILab). The first restart is at step 2, the next ones GRAM_SPAN steps later.
    """
    gram, factor, total, spare = squares
    symmetric = partial(multiply, kernels=kernels, is_symmetric=True)
    x = next(views)
    calls: list[Call] = []
    for index, of_step in enumerate(coefficients):
        if starts := not index or _restarts(index):
            calls.append(symmetric(x, x.mT, gram))
        calls.append(evaluate(gram, factor, of_step, kernels=kernels))
        ends = index + 1 == len(coefficients) or _restarts(index + 1)
        if not ends:
            calls.append(symmetric(gram, factor, spare))
            calls.append(symmetric(factor, spare, gram))
        if starts:
            factor, total = total, factor
        else:
            calls.append(symmetric(total, factor, spare))
            total, spare = spare, total
        if ends:
            new = next(views)
            calls.append(multiply(total, x, new, kernels=kernels))
            x = new
    return calls, x


def _restarts(index: int) -> bool:
    return index % GRAM_SPAN == GRAM_SPAN - 1


def _pad(numel: int) -> int:
    return -(-numel // ALIGNMENT) * ALIGNMENT


def _carve(scratch: Tensor, shape: torch.Size, form: Form, is_tall: bool) -> Iterator[Tensor]:
    """Cut scratch into another batch of the matrices, and the batches of squares."""
    carver = Carver(scratch.view(torch.uint8), ALIGNMENT * scratch.itemsize)
    batch, side = shape[0], shape[2] if is_tall else shape[1]
    for part in [shape] + [torch.Size((batch, side, side))] * _NUM_SQUARES[form]:
        yield carver.take(part, scratch.dtype)
