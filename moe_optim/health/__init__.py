"""Health of quantized experts while Megatron trains: measured, reduced, written, warned of.

Offers ``HealthMonitor``. Imports buckets, weights and kernels.
"""
