"""Reading the files of checkpoints, from any source, without Megatron."""
