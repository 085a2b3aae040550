"""What ``python -m benchmarks offload`` measures: fused steps of states that lie on the host."""
