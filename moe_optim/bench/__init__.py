"""What ``moe-optim bench`` measures."""
