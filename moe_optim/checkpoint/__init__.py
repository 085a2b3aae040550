"""What a training process saves and loads: hooks into Megatron, state manifests, integrity.

Offers ``load`` and ``save`` (hooks) and ``integrity``; ``checkpoint/files`` reads files without
Megatron. Imports experts, weights and ``integration/installation``.
"""
