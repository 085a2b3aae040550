"""Amaxes of experts: calibration, checkpoint entries, ModelOpt exchange, and fake quantization.

Provides ``calibrate``, ``fake_quantize``, ``expert_linears`` and checkpoint entries. Imports
weights, buckets and ``integration/installation``.
"""
