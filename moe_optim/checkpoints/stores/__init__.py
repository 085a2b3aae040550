"""Checkpoints as files: ``torch_dist`` and safetensors."""
