"""The names of Megatron that are rebound, and what rebinds them."""
