"""Transformer Engine weights; the only package that accesses their private fields."""
