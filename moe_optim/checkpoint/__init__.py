"""Hooks into Megatron's checkpointing, state manifests and integrity checks.

Entry points are ``load``, ``save`` and ``integrity``; ``files`` reads checkpoints without Megatron.
Imports experts, weights and ``integration/installation``.
"""
