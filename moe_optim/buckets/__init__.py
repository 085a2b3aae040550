"""Parameter and gradient buffers of quantized weights: layouts, states, gathers, offloading.

Offers the buffer and bucket group that stand in for Megatron's, and ``ManagedBucket``. Imports
weights, kernels and ``integration/installation``.
"""
