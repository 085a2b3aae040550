"""Triton kernels, and the plans that launch them or their plain-torch equivalents."""
