"""What quantized experts have lost: the table of masters and buffers, and the kernel over them."""

from moe_optim.kernels.health.table import HealthEntry, HealthTable

__all__ = ["HealthEntry", "HealthTable"]
