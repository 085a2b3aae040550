"""Amaxes of experts: found, held, saved, exchanged with ModelOpt, and read by fake quantization.

Offers ``calibrate``, ``fake_quantize``, ``expert_linears`` and the entries of checkpoints. Imports
weights, buckets and ``integration/installation``.
"""
