"""Quantized experts as inference engines take them: names, bytes and scales."""
