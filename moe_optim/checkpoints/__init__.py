"""Checkpoints as files: read, checked and written without Megatron."""
