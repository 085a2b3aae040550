"""Runs and measurements beside Megatron, Transformer Engine and serving engines."""
