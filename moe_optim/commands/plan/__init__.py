"""What ``moe-optim plan`` computes and draws."""
