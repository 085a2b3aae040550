"""``python -m benchmarks muon``: Muon's step of expert weights, beside stock."""
