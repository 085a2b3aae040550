"""Checkpoints of a training process: hooks into Megatron, state manifests, integrity.

Offers ``load`` and ``save`` (hooks) and ``integrity``; ``checkpoint/files`` reads files without
Megatron. Imports experts, weights and ``integration/installation``.
"""
