"""Exports checkpoints of any layout as safetensors with quantized experts for inference engines."""
