"""``python -m benchmarks export``: export of weights from training to an engine."""
