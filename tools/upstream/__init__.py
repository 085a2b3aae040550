"""Tests and measurements against Megatron, Transformer Engine and inference engines."""
