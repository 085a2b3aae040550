"""Portable experts for Megatron's local spec."""
