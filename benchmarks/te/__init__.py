"""Transformer Engine's own casts and steps, to hold ours against: bytes and time."""
