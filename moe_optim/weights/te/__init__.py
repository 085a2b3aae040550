"""Transformer Engine's weights: the one place that reads their private fields."""
