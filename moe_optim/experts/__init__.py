"""Expert layers: the portable module, its linears and grouped GEMM, and how they load and shard.

Provides ``GroupedExperts``, ``GroupedLinear`` and ``experts/keys``, the names of experts in state
dicts. Imports weights, calibration, kernels and ``integration/installation``.
"""
