"""Amaxes of experts from a forward pass or from weights, and their exchange with ModelOpt.

Offers ``calibrate``, ``amaxes_to_modelopt`` and ``amaxes_from_modelopt``. Imports experts, weights
and buckets.
"""
