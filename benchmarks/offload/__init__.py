"""``python -m benchmarks offload``: fused steps with states on the host."""
