"""Readers of checkpoint files from untrusted sources, without Megatron."""
