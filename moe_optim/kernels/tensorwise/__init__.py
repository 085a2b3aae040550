"""Masters to weights with one scale each: the table of them, and the kernels that cast them."""

from moe_optim.kernels.tensorwise.table import ScaledWeight, TensorwiseTable

__all__ = ["ScaledWeight", "TensorwiseTable"]
