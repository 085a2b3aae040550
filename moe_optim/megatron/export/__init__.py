"""Weights of a live model for inference engines: experts as they are quantized."""
