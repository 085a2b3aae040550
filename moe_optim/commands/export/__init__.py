"""Quantized experts on disk, from checkpoints of any layout, for engines that read safetensors."""
