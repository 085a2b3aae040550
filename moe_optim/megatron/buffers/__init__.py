"""Parameter and gradient buffers of quantized weights, and how these are gathered."""
