"""Transformer Engine on machines without it, or without its kernels."""
