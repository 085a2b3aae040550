"""Newton-Schulz iteration in plain torch: the definition of Muon's orthogonalization.

With singular value decomposition x = U diag(s) V^T, the iteration returns an approximation of
U V^T. Each step maps every singular value by an odd polynomial, ``a s + b s^3 + c s^5``::

    A = X X^T
    B = b A + c A A
    X = a X + B X

The operations, their order and their roundings are those of ``newton_schulz`` of
emerging-optimizers 0.3.0 (orthogonalized_optimizers/muon_utils.py), so that both give the same bits
on a CPU. The iteration itself is due to Keller Jordan's Muon
(https://kellerjordan.github.io/posts/muon/).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, cycle, islice, repeat
from types import MappingProxyType
from typing import Literal, cast, get_args

import torch
from torch import Tensor

from moe_optim.errors import ConfigError

type Coefficients = tuple[tuple[float, float, float], ...]
ScaleMode = Literal["spectral", "unit_rms_norm", "shape_scaling"]
Precision = Literal["medium", "high", "highest"]

EPS = 1e-7
"""Smallest Frobenius norm that a matrix is divided by."""

_SIMPLE = (3.4445, -4.7750, 2.0315)

COEFFICIENTS: Mapping[str, Coefficients] = MappingProxyType(
    {
        "simple": (_SIMPLE,),
        "quintic": (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
        "polar_express": (
            (8.2051, -22.9019, 16.4607),
            (4.0664, -2.8612, 0.5184),
            (3.9096, -2.8234, 0.5250),
            (3.2856, -2.4153, 0.4853),
            (2.2779, -1.6198, 0.3985),
            (1.8726, -1.2307, 0.3585),
            (1.8564, -1.2132, 0.3568),
            (1.8750, -1.2500, 0.3750),
        ),
        "cans": (
            (8.4703, -25.1081, 18.6293),
            (4.1828, -3.1087, 0.5806),
            (3.9619, -2.9541, 0.5630),
            (3.2866, -2.4647, 0.5074),
            (2.2737, -1.6447, 0.4162),
        ),
        "aol": (
            (4.0098, -7.0585, 2.4635),
            (3.4585, -5.5479, 2.5959),
            (2.7573, -3.2939, 1.4254),
            (2.7215, -3.0494, 1.3169),
        ),
        "deepseekv4": (*[_SIMPLE] * 8, *[(2.0, -1.5, 0.5)] * 2),
    }
)
"""Polynomial coefficients (a, b, c) of each step, by the type's name in emerging-optimizers.

``simple``: Keller Jordan's Muon (https://kellerjordan.github.io/posts/muon/). ``quintic``: Franz
Cesista (https://leloykun.github.io/ponder/muon-opt-coeffs/), as used in modded-nanogpt.
``polar_express``: Amsel et al. (arXiv:2505.16932), divided by powers of 1.01. ``cans``: Grishina
et al. (arXiv:2506.10935). ``aol``: Thibaut Boissin's flash-newton-schulz
(https://github.com/thib-s/flash-newton-schulz). ``deepseekv4``: report of DeepSeek-V4
(https://huggingface.co/deepseek-ai/DeepSeek-V4-Pro).
"""

_REPEATING_THEIR_LAST = frozenset({"polar_express", "cans", "deepseekv4"})
"""Types that repeat their last step when they run out; the others start again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Orthogonalization:
    """Settings of the Newton-Schulz iteration and of the scale of its result."""

    coefficient_type: str = "quintic"
    """Key of ``COEFFICIENTS``."""
    num_steps: int = 5
    """Number of iterations, at least 1."""
    scale_mode: ScaleMode = "spectral"
    """Scale by shape, see :meth:`scale`."""
    extra_scale_factor: float = 1.0
    """Factor on top of the scale."""
    precision: Precision = "medium"
    """Precision of the products: ``medium`` iterates in bf16, the others in fp32 with products as
    ``torch.set_float32_matmul_precision`` describes them."""

    def __post_init__(self) -> None:
        _check("coefficient_type", self.coefficient_type, COEFFICIENTS)
        _check("scale_mode", self.scale_mode, get_args(ScaleMode))
        _check("precision", self.precision, get_args(Precision))
        if self.num_steps < 1:
            raise ConfigError(
                f"Muon's num_steps: expected at least 1, got {self.num_steps}. Write 5, the "
                "default, or another positive number."
            )

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the iterates: bf16 for ``medium``, fp32 otherwise."""
        return torch.bfloat16 if self.precision == "medium" else torch.float32

    def coefficients(self) -> Coefficients:
        """Return (a, b, c) of each of the ``num_steps`` iterations."""
        steps = COEFFICIENTS[self.coefficient_type]
        if self.coefficient_type in _REPEATING_THEIR_LAST:
            return tuple(islice(chain(steps, repeat(steps[-1])), self.num_steps))
        return tuple(islice(cycle(steps), self.num_steps))

    def scale(self, rows: int, cols: int) -> float:
        """Return the factor of a result, without the extra scale factor.

        ``spectral``: sqrt(max(rows, cols)) (arXiv:2502.16982). ``unit_rms_norm``: sqrt(rows / cols)
        (arXiv:2502.07529). ``shape_scaling``: sqrt(max(1, rows / cols)), as in Keller Jordan's
        Muon.

        Args:
            rows: rows of the matrix; if tensor parallelism cuts it, of the whole one.
            cols: columns of the matrix; if tensor parallelism cuts it, of the whole one.
        """
        squares = {
            "spectral": max(rows, cols),
            "unit_rms_norm": rows / cols,
            "shape_scaling": max(1, rows / cols),
        }
        return cast(float, squares[self.scale_mode] ** 0.5)


def orthogonalize(
    x: Tensor,
    how: Orthogonalization,
    *,
    transpose: bool | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the Newton-Schulz result of one matrix or a batch, unscaled, in fp32.

    Args:
        x: matrices, fp32 [R, C] or [B, R, C], each divided by its own norm first.
        how: coefficients, number of steps and precision; scales are not applied.
        transpose: whether to iterate on x^T, whose Gram matrix is [C, C]; None takes the smaller
            Gram matrix.
        dtype: dtype of the iterates in place of ``how.dtype``: fp16, or fp64 as the exact result
            of the normalized matrix.

    Returns:
        Result, fp32 with the shape of ``x``, not aliasing it.
    """
    if transpose is None:
        transpose = x.size(-2) > x.size(-1)
    iterate = x.mT if transpose else x
    # the Frobenius norm bounds the singular values
    iterate = iterate / torch.linalg.vector_norm(iterate, dim=(-2, -1), keepdim=True).clamp_min(EPS)
    with matmul_precision(how.precision):
        iterate = iterate.to(dtype or how.dtype)
        for coefficients in how.coefficients():
            iterate = _step(iterate, coefficients)
    result = iterate.float()
    return result.mT if transpose else result


def _step(x: Tensor, coefficients: tuple[float, float, float]) -> Tensor:
    # baddbmm and addmm may take different kernels, so that a batch of one is not a matrix
    multiply_add = torch.addmm if x.ndim == 2 else torch.baddbmm
    a, b, c = coefficients
    gram = x @ x.mT
    polynomial = multiply_add(gram, gram, gram, beta=b, alpha=c)
    return multiply_add(x, polynomial, x, beta=a)


@contextmanager
def matmul_precision(precision: Precision) -> Iterator[None]:
    """Set torch's precision of fp32 GEMMs in a block."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _check(setting: str, value: str, accepted: Mapping[str, object] | tuple[str, ...]) -> None:
    if value not in accepted:
        raise ConfigError(
            f"Muon's {setting}: expected {' or '.join(accepted)}, got {value!r}. "
            "Write one of the expected values."
        )
