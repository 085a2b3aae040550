"""Quantized expert weights: the parameter, its storage (portable or Transformer Engine's), names.

Exports ``GroupedWeight``, ``WeightStorage`` and ``storage_of``. Only ``weights/te`` accesses
private fields of Transformer Engine. Imports formats, kernels and ``integration/installation``.
"""
