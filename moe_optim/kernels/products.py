"""Products of batches of matrices, as kernels or as plain torch."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_optim.kernels.plan import ALIGNMENT, BoundKernel, Call, takes_kernels
from moe_optim.kernels.tuning import POLYNOMIAL_TILE, PRODUCT_TILES


def multiply(
    left: Tensor,
    right: Tensor,
    out: Tensor,
    *,
    kernels: bool,
    plus: float = 0.0,
    is_symmetric: bool = False,
) -> Call:
    """Return the call that writes left @ right + plus * right to ``out``, as kernel or plain torch.

    Tensors are [B, m, k], [B, k, n] and [B, m, n], contiguous or transposed views of contiguous
    ones; ``out`` overlaps no factor. ``plus`` is 0 for kernels, which compute one triangle of
    symmetric results and mirror it.
    """
    if not kernels and not plus:
        return partial(torch.bmm, left, right, out=out)
    if not kernels:
        return partial(torch.baddbmm, right, left, right, beta=plus, out=out)
    from moe_optim.kernels.newton_schulz_kernel import product_kernel

    if not out.is_contiguous():
        left, right, out = right.mT, left.mT, out.mT
    tile = PRODUCT_TILES[is_symmetric]
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
        IS_SYMMETRIC=is_symmetric,
        TILE_ROWS=tile.rows,
        TILE_COLS=tile.cols,
        TILE_INNER=tile.inner,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def evaluate(
    squares: Tensor, out: Tensor, coefficients: tuple[float, float, float], *, kernels: bool
) -> Call:
    """Return the call that writes a I + b A + c A A to ``out``; plain torch rounds before a I.

    A are symmetric, [B, m, m], contiguous; ``out`` does not overlap A. c is not 0 for kernels.
    """
    if not kernels:
        return partial(_evaluate, squares, out, *coefficients)
    from moe_optim.kernels.newton_schulz_kernel import polynomial_kernel

    tile = POLYNOMIAL_TILE
    batch, rows, _ = out.shape
    tiles_down = -(-rows // tile.rows)
    return BoundKernel(
        polynomial_kernel,
        batch * tiles_down * (tiles_down + 1) // 2,
        _describe(squares, tile.rows, tile.inner),
        _describe(squares, tile.rows, tile.rows),
        _describe(out, tile.rows, tile.rows),
        rows,
        *coefficients,
        TILE_ROWS=tile.rows,
        TILE_INNER=tile.inner,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _evaluate(squares: Tensor, out: Tensor, a: float, b: float, c: float) -> None:
    torch.baddbmm(squares, squares, squares, beta=b, alpha=c, out=out)
    if a:
        out.diagonal(dim1=1, dim2=2).add_(a)


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
