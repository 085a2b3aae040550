"""What ``moe-optim bench offload`` measures: fused steps of states that lie on the host."""
