"""Correspondence of Megatron arguments and ``config.json`` keys, per family and shared."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from moe_optim.commands.hugging_face import values
from moe_optim.commands.hugging_face.values import Allowed, ValueKind, Values
from moe_optim.rollout.families import Trait

UNTIED = "untie_embeddings_and_output_weights"


@dataclass(frozen=True, slots=True)
class SharedValue:
    """A Megatron argument and a ``config.json`` key with the same value."""

    argument: str
    key: str
    kind: ValueKind = "count"


@dataclass(frozen=True, kw_only=True)
class FamilyRules:
    """Correspondence of one family."""

    family: str
    shared: tuple[SharedValue, ...]
    """Shared values, including those of all families."""
    argument_kinds: Mapping[str, ValueKind]
    """Kinds of the other arguments that are read."""
    config_kinds: Mapping[str, ValueKind]
    """Kinds of the other keys that are read."""
    arguments: Allowed
    """Values of other arguments that transformers supports."""
    config: Allowed
    """Values of other keys that Megatron supports."""
    defaults: Values
    """transformers' defaults of keys that published configurations omit."""
    argument_faults: Callable[[Values], list[str]]
    """Returns further arguments that transformers does not support; receives checked kinds."""
    config_faults: Callable[[Values], list[str]]
    """Returns further keys that Megatron does not support."""
    arguments_of: Callable[[Values], dict[str, Any]]
    """Returns the arguments that are not shared, from a configuration."""
    config_of: Callable[[Values], dict[str, Any]]
    """Returns the keys that are not shared, from arguments, of which some may be missing."""
    traits_of: Callable[[Values], frozenset[Trait]] = lambda _: frozenset()
    """Returns the traits of a model besides ``untied``."""


SHARED = (
    SharedValue("num_layers", "num_hidden_layers"),
    SharedValue("hidden_size", "hidden_size"),
    SharedValue("ffn_hidden_size", "intermediate_size"),
    SharedValue("moe_ffn_hidden_size", "moe_intermediate_size"),
    SharedValue("num_attention_heads", "num_attention_heads"),
    SharedValue("moe_router_topk", "num_experts_per_tok"),
    SharedValue("padded_vocab_size", "vocab_size"),
    SharedValue("max_position_embeddings", "max_position_embeddings"),
    SharedValue("layernorm_epsilon", "rms_norm_eps", "number"),
    SharedValue("rotary_base", "rope_theta", "number"),
    SharedValue("init_method_std", "initializer_range", "number"),
    SharedValue("attention_dropout", "attention_dropout", "number"),
)

ARGUMENTS: Allowed = {
    "swiglu": (True,),
    "qk_layernorm": (True,),
    "normalization": ("RMSNorm",),
    "position_embedding_type": ("rope",),
    "add_bias_linear": (False,),
    "add_qkv_bias": (False, None),
    "squared_relu": (False, None),
    "quick_geglu": (False, None),
    "layernorm_zero_centered_gamma": (False, None),
    "apply_residual_connection_post_layernorm": (False, None),
    "rotary_percent": (1.0, None),
    "rotary_interleaved": (False, None),
    "rotary_seq_len_interpolation_factor": (None, 1),
    "use_rope_scaling": (False, None),
    "no_rope_freq": (None,),
    "window_size": (None,),
    "softmax_type": ("vanilla", None),
    "qk_l2_norm": (False, None),
    "attention_output_gate": (False, None),
    "experimental_attention_variant": (None,),
    "hybrid_layer_pattern": (None,),
    "heterogeneous_layers_config_path": (None,),
    "moe_latent_size": (None,),
    "moe_apply_probs_on_input": (False, None),
    "moe_shared_expert_gate": (False, None),
    "moe_shared_expert_glu_interleave_size": (None,),
    "activation_func_clamp_value": (None,),
    "glu_linear_offset": (0.0, None),
}
CONFIG: Allowed = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "quantization_config": (None,),
}
DEFAULTS: Values = {
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
}


def layer_freq(has_experts: Iterable[bool]) -> int | list[int]:
    """Return ``moe_layer_freq``: 1 if all layers have experts, which Megatron then stacks."""
    marks = [int(one) for one in has_experts]
    return 1 if all(marks) else marks


def layers_with_experts(given: Values) -> list[bool]:
    """Return whether each layer of a model has experts, given its arguments."""
    return values.layers_with_experts(given["num_layers"], given.get("moe_layer_freq", 1))
