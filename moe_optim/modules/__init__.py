"""Expert weights as tensors and the products that read them; knows torch, not Megatron."""
