"""Export of a live model's weights to inference engines, without dequantizing experts.

Entry points are ``export_weights`` and the engines' naming conventions. Imports experts, buckets
and weights.
"""
