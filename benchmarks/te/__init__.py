"""Transformer Engine's own casts and steps as references for bytes and time."""
