"""Registration order of Megatron's parameters, by their stored names.

Flat states are in the reverse of that order. It follows ``__init__`` of the modules of Megatron
0.19.2: ``GPTModel``, ``TransformerLayer``, ``SelfAttention``, ``MLASelfAttention``, ``MLP`` and
``MoELayer``. Callers must verify it against values.
"""

import re
from collections.abc import Iterable

_LAYER = re.compile(r"decoder\.layers\.(0|[1-9][0-9]{0,3})\.(.+)")
_INPUT_NORM = "self_attention.linear_qkv.layer_norm_weight"
_ATTENTION = (
    "self_attention.linear_proj.weight",
    "self_attention.linear_proj.bias",
    "self_attention.linear_q_proj.weight",
    "self_attention.linear_q_down_proj.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.linear_q_up_proj.weight",
    "self_attention.linear_kv_down_proj.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight",
    "self_attention.linear_kv_up_proj.weight",
    _INPUT_NORM,
    "self_attention.linear_qkv.weight",
    "self_attention.linear_qkv.bias",
    "self_attention.q_layernorm.weight",
    "self_attention.k_layernorm.weight",
    "self_attention.kv_layernorm.weight",
)
_NETWORK = (
    "pre_mlp_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight",
    "mlp.linear_fc1.weight",
    "mlp.linear_fc1.bias",
    "mlp.linear_fc2.weight",
    "mlp.linear_fc2.bias",
    "mlp.router.weight",
    "mlp.router.bias",
    "mlp.experts.linear_fc1.weight",
    "mlp.experts.linear_fc1.bias",
    "mlp.experts.linear_fc2.weight",
    "mlp.experts.linear_fc2.bias",
    "mlp.shared_experts.linear_fc1.weight",
    "mlp.shared_experts.linear_fc2.weight",
)
_FUSED = ("input_layernorm.weight", *_ATTENTION, *_NETWORK)
# Megatron's local layers store the first norm as part of the next module
_APART = (
    "input_layernorm.weight",
    _INPUT_NORM,
    *(name for name in _ATTENTION if name != _INPUT_NORM),
    *_NETWORK,
)
_FIRST = ("embedding.word_embeddings.weight", "embedding.position_embeddings.weight")
_LAST = (
    "decoder.final_layernorm.weight",
    "output_layer.weight",
)


def registration_order(names: Iterable[str], transformer_impl: str) -> list[str] | None:
    """Return parameter names in the order in which a model registers them.

    Args:
        names: parameter names in ``torch_dist``, one per layer, experts in layout ``grouped``.
        transformer_impl: Megatron's argument.

    Returns:
        Ordered names; None if one belongs to an unknown module.
    """
    within = _APART if transformer_impl == "local" else _FUSED
    places: dict[str, tuple[int, int, int]] = {}
    for name in names:
        layer = _LAYER.fullmatch(name)
        if layer and layer[2] in within:
            places[name] = (1, int(layer[1]), within.index(layer[2]))
        elif name in _FIRST:
            places[name] = (0, 0, _FIRST.index(name))
        elif name in _LAST:
            places[name] = (2, 0, _LAST.index(name))
        else:
            return None
    return sorted(places, key=lambda name: places[name])
