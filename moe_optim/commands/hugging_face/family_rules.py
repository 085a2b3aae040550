"""Correspondence of Megatron arguments and ``config.json`` keys, per family and shared.

Arguments and configurations from untrusted files are validated by functions that return faults, one
line each, instead of raising.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from moe_optim.rollout.families import FAMILIES, Settings, Trait

ValueKind = Literal["count", "number", "flag", "layers", "count?", "number?", "layers?"]
"""Positive integer, finite number, bool, or list of layer numbers; ``?``: may be None."""

_LARGEST = 2**40
MOST_LAYERS = 4096  # upper limit on layers, above any real model

Values = Mapping[str, Any]
UNTIED = "untie_embeddings_and_output_weights"


@dataclass(frozen=True, slots=True)
class SharedValue:
    """A Megatron argument and a ``config.json`` key with the same value."""

    argument: str
    key: str
    kind: ValueKind = "count"


@dataclass(frozen=True, kw_only=True)
class FamilyRules:
    """Correspondence of one family.

    Kinds are those of arguments and keys that are read besides the shared ones; ``arguments`` and
    ``config`` are their values that the other side supports. ``argument_faults`` and
    ``config_faults`` return what else it does not, of values of checked kinds. ``arguments_of`` and
    ``config_of`` return what is not shared, the latter from arguments of which some may be missing.
    """

    family: str
    shared: tuple[SharedValue, ...]  # shared values, including those of all families
    argument_kinds: Mapping[str, ValueKind]
    config_kinds: Mapping[str, ValueKind]
    arguments: Settings
    config: Settings
    defaults: Values  # transformers' defaults of keys that published configurations omit
    argument_faults: Callable[[Values], list[str]]
    config_faults: Callable[[Values], list[str]]
    arguments_of: Callable[[Values], dict[str, Any]]
    config_of: Callable[[Values], dict[str, Any]]
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

_ABSENT = (
    "experimental_attention_variant", "hybrid_layer_pattern", "heterogeneous_layers_config_path",
    "moe_latent_size",
)  # fmt: skip
_OFF = (
    "add_qkv_bias", "squared_relu", "quick_geglu", "use_rope_scaling", "moe_shared_expert_gate",
)  # fmt: skip
_ARGUMENTS: Settings = {  # besides the settings of a family
    "swiglu": (True,),
    "qk_layernorm": (True,),
    "normalization": ("RMSNorm",),
    "position_embedding_type": ("rope",),
    "add_bias_linear": (False,),
    "rotary_seq_len_interpolation_factor": (None, 1),
    **dict.fromkeys(_OFF, (False, None)),
    **dict.fromkeys(_ABSENT, (None,)),
}
CONFIG: Settings = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "quantization_config": (None,),
}
DEFAULTS: Values = {
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
}


def arguments_of(family: str) -> Settings:
    """Return the values of arguments with which transformers computes the same as ``family``."""
    return {**FAMILIES[family].settings, **_ARGUMENTS}


def layer_freq(has_experts: Iterable[bool]) -> int | list[int]:
    """Return ``moe_layer_freq``: 1 if all layers have experts, which Megatron then stacks."""
    marks = [int(one) for one in has_experts]
    return 1 if all(marks) else marks


def experts_of_layers(given: Values) -> list[bool]:
    """Return whether each layer of a model has experts, given its arguments."""
    return layers_with_experts(given["num_layers"], given.get("moe_layer_freq", 1))


def kind_faults(given: Values, kinds: Mapping[str, ValueKind]) -> list[str]:
    """Return values that are missing or of the wrong kind."""
    return [
        f"{name}: expected {_SPELLED[kind.removesuffix('?')]}, got {_spell(given.get(name))}"
        for name, kind in kinds.items()
        if not _is_kind(given.get(name), kind)
    ]


def unlike(given: Values, allowed: Settings) -> list[str]:
    """Return values that are not allowed; a missing value is allowed."""
    return [
        f"{name}: expected {values[0]}, got {_spell(given[name])}"
        for name, values in allowed.items()
        if name in given and not any(_equal(given[name], value) for value in values)
    ]


def layer_faults(num_layers: int, freq: Any) -> list[str]:
    """Return why Megatron's ``num_layers`` or ``moe_layer_freq`` is invalid."""
    if num_layers > MOST_LAYERS:
        return [f"layers: expected at most {MOST_LAYERS:,}, got {num_layers:,}"]
    is_pattern = isinstance(freq, list) and len(freq) == num_layers
    if (type(freq) is int and freq > 0) or (
        is_pattern and all(type(x) is int and x in (0, 1) for x in freq)
    ):
        return []
    return [f"moe_layer_freq: expected a number or {num_layers} zeros and ones, got {_spell(freq)}"]


def layers_with_experts(num_layers: int, freq: int | list[int]) -> list[bool]:
    """Return whether each layer has experts, by Megatron's rules for ``moe_layer_freq``."""
    if isinstance(freq, int):
        return [layer % freq == 0 for layer in range(num_layers)]
    return [mark == 1 for mark in freq]


def _is_kind(value: Any, kind: ValueKind) -> bool:
    if value is None:
        return kind.endswith("?")
    if kind == "flag":
        return type(value) is bool
    if kind.startswith("layers"):
        return isinstance(value, list) and all(type(x) is int and x >= 0 for x in value)
    if kind.startswith("count"):
        return type(value) is int and 0 < value < _LARGEST
    return type(value) in (int, float) and math.isfinite(value) and abs(value) < _LARGEST


def _equal(value: Any, allowed: Any) -> bool:
    """Compare as JSON does: true is not 1."""
    is_flag = isinstance(value, bool) or isinstance(allowed, bool)
    return value is allowed if is_flag else bool(type(value) in _PLAIN and value == allowed)


def _spell(value: Any) -> str:
    text = repr(value) if type(value) in (*_PLAIN, bool, list) else "something else"
    return text if len(text) <= 60 else f"{text[:57]}..."


_PLAIN = (int, float, str, type(None))
_SPELLED = {
    "count": "a whole number from 1 on",
    "number": "a number",
    "flag": "true or false",
    "layers": "a list of layers",
}
