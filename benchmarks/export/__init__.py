"""``python -m benchmarks export``: weights on their way from training to an engine."""
