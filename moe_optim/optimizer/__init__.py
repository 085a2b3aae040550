"""The distributed optimizer of quantized weights: factory, chain, fused step, graph, host states.

Provides ``get_megatron_optimizer``, ``GroupedDistributedOptimizer`` and ``describe``. Imports
buckets, checkpoint, experts, health and weights.
"""
