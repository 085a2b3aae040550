"""Health of quantized experts while Megatron trains: measured, reduced, written, warned of.

Offers ``HealthMonitor``, an observer that the factory registers with the optimizer.
Imports buckets, weights and kernels.
"""
