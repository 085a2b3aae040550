"""The squared norm of gradients where they lie: the table of them, and the kernels that read it."""

from moe_optim.kernels.norm.table import Gradients, NormTable

__all__ = ["Gradients", "NormTable"]
