"""Weights of a live model for inference engines, quantized as they are.

Offers ``export_weights`` and the naming conventions of engines. Imports experts, buckets and
weights.
"""
