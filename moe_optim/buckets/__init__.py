"""Parameter and gradient buffers of quantized weights: layouts, states, gathers, offloading.

Provides ``ManagedBucket`` and replacements of Megatron's buffer and bucket group. Imports weights,
kernels and ``integration/installation``.
"""
