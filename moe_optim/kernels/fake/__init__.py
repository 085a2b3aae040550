"""Fake quantization of experts where they lie: the table of them, and the kernels that read it."""
