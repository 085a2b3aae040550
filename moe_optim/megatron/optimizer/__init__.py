"""The distributed optimizer of quantized weights."""
