"""Checkpoints that tests write, and models they are converted from and to."""
