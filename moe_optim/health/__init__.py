"""Health of quantized experts during training: measured, reduced, written, with warnings.

Provides ``HealthMonitor``, an observer that the factory registers with the optimizer. Imports
buckets, weights and kernels.
"""
