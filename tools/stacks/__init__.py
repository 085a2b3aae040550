"""Runs training stacks of others, whole, with the plug-in and without, and records the outcome."""
