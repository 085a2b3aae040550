"""Products of batches of matrices, as kernels or as plain torch."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_optim.kernels.plan import ALIGNMENT, BoundKernel, Call, takes_kernels
from moe_optim.kernels.tuning import POLYNOMIAL_TILE, PRODUCT_TILES


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Product:
    """Product of matrices: out = left @ right + plus * right.

    Tensors may be transposed views of contiguous ones.
    """

    left: Tensor
    """Left factors, [B, m, k]."""
    right: Tensor
    """Right factors, [B, k, n]."""
    out: Tensor
    """Memory of the results, [B, m, n]; overlaps no factor."""
    plus: float = 0.0
    """Multiple of ``right`` to add; 0 for kernels."""
    is_symmetric: bool = False
    """Whether the results are symmetric, so that kernels compute one triangle and mirror it."""

    def call_torch(self) -> Call:
        """Return a call of plain torch."""
        left, right, out = self.left, self.right, self.out
        if not self.plus:
            return partial(torch.bmm, left, right, out=out)
        return partial(torch.baddbmm, right, left, right, beta=self.plus, out=out)

    def bind(self) -> BoundKernel:
        """Return a kernel."""
        from moe_optim.kernels.newton_schulz_kernel import product_kernel

        left, right, out = self.left, self.right, self.out
        if not out.is_contiguous():
            left, right, out = right.mT, left.mT, out.mT
        tile = PRODUCT_TILES[self.is_symmetric]
        return BoundKernel(
            product_kernel,
            count_multiprocessors(out.device),
            _describe(left, tile.rows, tile.inner),
            _describe(right, tile.inner, tile.cols),
            _describe(out, tile.rows, tile.rows),
            *out.shape,
            left.shape[2],
            LEFT_IS_TRANSPOSED=not left.is_contiguous(),
            RIGHT_IS_TRANSPOSED=not right.is_contiguous(),
            IS_SYMMETRIC=self.is_symmetric,
            TILE_ROWS=tile.rows,
            TILE_COLS=tile.cols,
            TILE_INNER=tile.inner,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Polynomial:
    """Polynomial of symmetric matrices: out = a I + b A + c A A."""

    squares: Tensor
    """Matrices A, [B, m, m], contiguous."""
    out: Tensor
    """Memory of the results, [B, m, m], contiguous; does not overlap A."""
    a: float
    b: float
    c: float
    """Coefficient of A A; not 0 for kernels."""

    def call_torch(self) -> Call:
        """Return a call of plain torch, which rounds before it adds a I."""
        return self._evaluate

    def _evaluate(self) -> None:
        squares, out = self.squares, self.out
        torch.baddbmm(squares, squares, squares, beta=self.b, alpha=self.c, out=out)
        if self.a:
            out.diagonal(dim1=1, dim2=2).add_(self.a)

    def bind(self) -> BoundKernel:
        """Return a kernel."""
        from moe_optim.kernels.newton_schulz_kernel import polynomial_kernel

        tile = POLYNOMIAL_TILE
        batch, rows, _ = self.out.shape
        tiles_down = -(-rows // tile.rows)
        return BoundKernel(
            polynomial_kernel,
            batch * tiles_down * (tiles_down + 1) // 2,
            _describe(self.squares, tile.rows, tile.inner),
            _describe(self.squares, tile.rows, tile.rows),
            _describe(self.out, tile.rows, tile.rows),
            rows,
            self.a,
            self.b,
            self.c,
            TILE_ROWS=tile.rows,
            TILE_INNER=tile.inner,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )


Step = Product | Polynomial


def serves_products(backend: str, matrices: Tensor, scratch: Tensor) -> bool:
    """Return whether kernels multiply matrices of a shape; TMA reads rows of whole 16 bytes."""
    if not takes_kernels(backend, matrices.device, e4m3=False) or not is_hopper(matrices.device):
        return False
    rows = [matrices.itemsize * size for size in matrices.shape[1:]]
    starts = [matrices.data_ptr(), scratch.data_ptr()]
    return matrices.itemsize == 2 and not any(at % ALIGNMENT for at in rows + starts)


def is_hopper(device: torch.device) -> bool:
    """Return whether a CUDA device has compute capability 9.x, for which tiles were measured."""
    return torch.cuda.get_device_capability(device)[0] == 9


def count_multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def _describe(matrices: Tensor, rows: int, cols: int) -> Any:
    """Return a TMA descriptor of [B, M, N], or of what a view transposes, in blocks."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    if matrices.is_contiguous():
        return TensorDescriptor.from_tensor(matrices, [1, rows, cols])
    return TensorDescriptor.from_tensor(matrices.mT, [1, cols, rows])
