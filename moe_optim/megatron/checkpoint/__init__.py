"""Masters, moments and weights in Megatron's checkpoints."""
