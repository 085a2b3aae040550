"""Rounding error of the Newton-Schulz iteration: a bound to first order in the unit roundoff."""

import math

import torch
from torch import Tensor

from moe_optim.formats.reference.newton_schulz import EPS, Orthogonalization

_ACCUMULATION = 2.0**-23
"""Relative error of one addition in fp32, truncated as in tensor cores."""
_SPREAD = 2.0
"""Gain of errors that spread over all pairs, over the root mean square of the gains of pairs."""
_GROWTH = 1.5
"""Growth of the largest singular value by rounding up to which first order describes the error."""


def error_bound(
    how: Orthogonalization, dtype: torch.dtype, x: Tensor, *, is_folded: bool = False
) -> float:
    """Return a bound of ||computed - exact||_F / ||exact||_F for one matrix.

    ``exact`` is the iteration without rounding on the same normalized matrix, as
    ``orthogonalize(x, how, dtype=torch.float64)``. ``computed`` iterates in ``dtype``: the
    normalized matrix, A, B and each X are rounded to it once, and products accumulate in fp32, in
    any order. Where one triangle of A or B is mirrored, the same bound holds. It does not describe
    the Gram form, which has other iterates.

    **Local errors.** Let u be the unit roundoff of ``dtype``, e half of its smallest subnormal,
    R(Y) = u ||Y|| + e sqrt(numel of Y) in Frobenius norms, and g(n) = sqrt(n) 2^-23 for sums of n
    terms: partial sums of an entry of a product stay below the product of the norms of row and
    column (Cauchy-Schwarz), and n roundings of that size add up as independent ones (Higham and
    Mary, SIAM J. Sci. Comput. 41(5), 2019). With r rows and c columns, one step adds::

        to X0  R(X0)
        to A   R(A) + g(c) ||X||^2
        to B   R(B) + |c| g(r) ||A||^2
        to X'  R(X') + g(r) ||B|| ||X||

    **Propagation**, exact to first order, in the basis of the singular vectors, where the exact
    iterates are diag(s). An error E of A becomes (b + c (s_i^2 + s_j^2)) E_ij in B, and an error
    of B is multiplied by s_j in X'. A polynomial p multiplies an error E of X by p[s_i, s_j] on
    the symmetric part of E and by p[s_i, -s_j] on the antisymmetric part, with divided difference
    p[x, y] = (p(x) - p(y)) / (x - y) (Daleckii and Krein; Bhatia, Matrix Analysis, theorem V.3.3,
    for [[0, X], [X^T, 0]]); columns beyond the rows count as s_j = 0. Gains of steps in a row
    multiply, for divided differences of composed functions do.

    **Sum.** The bound adds the local errors of all steps, each times its gain. A gain is at most
    the largest over all pairs (i, j). Rounding errors are modelled as a part that is proportional
    to what is rounded, as if all entries were off by the same factor, and a part that spreads over
    all pairs, with a gain of twice their root mean square. The bound is 5 to 40 times what is
    observed of Gaussian matrices with five steps; it is further off where rounding errors stay in
    a part of the spectrum.

    **Stability.** First order says nothing where rounding drives a singular value out of the
    interval on which the polynomials are bounded. The bound is infinite where the largest singular
    value that rounding leaves possible outgrows its recursion without rounding by half. That is so
    of ``cans`` in bf16 and often in fp16, which can diverge to NaN, and of ``polar_express`` in
    bf16 for matrices of nearly rank 1.

    Args:
        how: coefficients and number of steps.
        dtype: dtype of the iterates, bf16 or fp16.
        x: matrix before normalization, fp32 [R, C], not zero.
        is_folded: whether W = a I + B is rounded in place of B, and X' = W X, as kernels compute.
    """
    rows, cols = sorted(x.shape)
    normalized = x / torch.linalg.vector_norm(x).clamp_min(EPS)
    spectra = [torch.linalg.svdvals(normalized.double())]
    if not _is_stable(how, spectra[0].amax().item(), torch.finfo(dtype).eps / 2):
        return math.inf
    for a, b, c in how.coefficients():
        spectra.append(_polynomial(a, b, c, spectra[-1]))
    gains = torch.ones(2, rows, rows + 1, dtype=torch.float64, device=x.device)
    total = 0.0
    steps = zip(reversed(how.coefficients()), reversed(spectra[:-1]), strict=True)
    for coefficients, spectrum in steps:
        total += _error_of_step(
            coefficients, spectrum, cols, dtype, gains.abs().amax(0), is_folded=is_folded
        )
        gains *= _divided_differences(coefficients, spectrum)
    initial = _rounding(spectra[0], rows * cols, dtype)
    total += _gain(gains.abs().amax(0), spectra[0], cols) * initial
    return float(total / spectra[-1].norm())


def _error_of_step(
    coefficients: tuple[float, float, float],
    s: Tensor,
    cols: int,
    dtype: torch.dtype,
    gains: Tensor,
    *,
    is_folded: bool,
) -> float:
    """Return the bound of what one step's errors become in the result, in the Frobenius norm.

    Args:
        coefficients: a, b and c.
        s: exact singular values before the step, fp64 [rows].
        cols: number of columns.
        dtype: dtype of the iterates.
        gains: gains of the steps that follow, fp64 [rows, rows + 1].
        is_folded: whether W is rounded in place of B, as for :func:`error_bound`.
    """
    a, b, c = coefficients
    rows = s.numel()
    gram = s.square()
    polynomial = gram * (b + c * gram)
    result = s * (a + polynomial)
    if is_folded:
        polynomial = a + polynomial
    of_gram = _rounding(gram, rows * rows, dtype) + _accumulation(cols) * s.norm().item() ** 2
    of_polynomial = _rounding(polynomial, rows * rows, dtype)
    of_polynomial += abs(c) * _accumulation(rows) * gram.norm().item() ** 2
    of_result = _rounding(result, rows * cols, dtype)
    of_result += _accumulation(rows) * (polynomial.norm() * s.norm()).item()
    from_polynomial = gains[:, :-1] * s.abs()
    from_gram = from_polynomial * (b + c * (gram[:, None] + gram)).abs()
    error = _gain(from_gram, gram, rows) * of_gram
    error += _gain(from_polynomial, polynomial, rows) * of_polynomial
    error += _gain(gains, result, cols) * of_result
    return float(error)


def _gain(gains: Tensor, rounded: Tensor, cols: int) -> float:
    """Return the gain of the rounding error of a matrix [rows, cols], in the Frobenius norm.

    Args:
        gains: gain of each entry in the singular basis, fp64 [rows, rows + 1]; columns beyond the
            rows all have the last.
        rounded: singular values of the matrix, fp64 [rows].
        cols: number of columns.
    """
    rows = len(gains)
    beyond = gains[:, rows:] if cols > rows else gains[:, :0]
    squares = gains[:, :rows].square().sum() + (cols - rows) * beyond.square().sum()
    spread = _SPREAD * (squares / (rows * cols)).sqrt()
    proportional = (gains.diagonal() * rounded).norm() / rounded.norm().clamp_min(EPS)
    largest = torch.cat([gains[:, :rows], beyond], 1).amax()
    return float(torch.minimum(largest, torch.hypot(spread, proportional)))


def _divided_differences(coefficients: tuple[float, float, float], s: Tensor) -> Tensor:
    """Return p[s_i, s_j] and p[s_i, -s_j], fp64 [2, rows, rows + 1], the last of s_j = 0."""
    a, b, c = coefficients
    x = s[:, None]
    y = torch.cat([s, s.new_zeros(1)])
    y = torch.stack([y, -y])[:, None]
    mixed = x.square() + y.square()
    product = x * y
    return a + b * (mixed + product) + c * (mixed.square() + mixed * product - product.square())


def _is_stable(how: Orthogonalization, largest: float, u: float) -> bool:
    """Return whether rounding keeps the singular values where the polynomials are bounded.

    The largest one is followed with and without the errors of A, B and X' that are proportional
    to them.
    """
    exact, rounded = largest, largest * (1 + u)
    for a, b, c in how.coefficients():
        s = torch.linspace(0, 1, 1001, dtype=torch.float64, device="cpu")
        exact = _polynomial(a, b, c, s * exact).abs().amax().item()
        s = s * rounded
        gram = s.square()
        values = _polynomial(a, b, c, s).abs()
        errors = values + _polynomial(0, b, c, s).abs() + s * gram * (b + 2 * c * gram).abs()
        rounded = (values + u * errors).amax().item()
        if not rounded < _GROWTH * exact:
            return False
    return True


def _polynomial(a: float, b: float, c: float, s: Tensor) -> Tensor:
    return s * (a + s.square() * (b + c * s.square()))


def _rounding(s: Tensor, numel: int, dtype: torch.dtype) -> float:
    """Return the bound of the error of rounding ``numel`` entries with singular values ``s``."""
    info = torch.finfo(dtype)
    return float(info.eps / 2 * s.norm() + info.tiny * info.eps / 2 * numel**0.5)


def _accumulation(terms: int) -> float:
    return math.sqrt(terms) * _ACCUMULATION
