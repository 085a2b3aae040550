"""Measurements quoted in the documents, compared with stock Megatron.

From a checkout: ``python -m benchmarks --help``. Not part of the wheel.
"""
