"""Scripts of Megatron-LM, and machines without a GPU."""
