"""Triton kernels, and the plans that launch them or plain torch in their place.

Knows formats, neither Megatron nor process groups.
"""
