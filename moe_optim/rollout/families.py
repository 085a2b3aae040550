"""Weight names in Megatron and Hugging Face, by model family.

Maps non-expert names in Megatron's ``torch_dist`` checkpoints, with layer numbers
(``decoder.layers.3.self_attention.linear_qkv.weight``), to transformers' on disk
(``model.layers.3.self_attn.q_proj.weight`` and so on), and back. ``expert_prefixes`` gives the
prefixes of a layer's experts, which on Hugging Face's side have the layout ``hf_per_expert`` of
:mod:`moe_optim.experts.keys.layouts`. Imports neither Megatron nor transformers.

Where Megatron's own layers and Transformer Engine's save a tensor under different names, both are
listed. To add a family, add a value to :data:`FAMILIES`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

Form = Literal["same", "qkv", "gate_up"]
"""Relation of a Megatron tensor to those of transformers: equal; query, key and value rows
concatenated by group; gate and up rows concatenated."""
Trait = Literal["untied", "query_lora", "no_query_lora", "expert_bias", "shared_experts"]
"""Property of some models of a family."""
Implementation = Literal["transformer_engine", "local"]
"""Megatron's ``--transformer-impl`` of a checkpoint."""

Settings = Mapping[str, tuple[Any, ...]]
"""Values of Megatron's settings with which both sides compute the same, by name in a
``TransformerConfig`` or ``GPTModel``."""

LAYOUT_OF_EXPERTS = "hf_per_expert"
"""Layout of experts in transformers' files; transformers fuses them while loading."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NamePair:
    """Names of one Megatron tensor on both sides."""

    megatron: tuple[str, ...]
    """Name in Transformer Engine's layers, then in Megatron's own if different."""
    hf: tuple[str, ...]
    """One name followed by those of copies; or query, key and value; or gate and up."""
    form: Form = "same"
    when: Trait | None = None
    """Trait of the models with this tensor; None: all models."""

    def megatron_name(self, implementation: Implementation) -> str:
        """Return the name in layers of one implementation."""
        return self.megatron[0 if implementation == "transformer_engine" else -1]

    def behind(self, megatron: str, hf: str) -> "NamePair":
        """Return the pair with prefixed names."""
        return replace(
            self,
            megatron=tuple(megatron + name for name in self.megatron),
            hf=tuple(hf + name for name in self.hf),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Anatomy:
    """Layers and traits, which determine the tensors of a model."""

    num_layers: int
    moe_layers: frozenset[int]
    """Numbers of the layers with experts; the others have a dense MLP."""
    traits: frozenset[Trait] = frozenset()
    mtp_layers: int = 0
    """Number of trailing multi-token prediction (MTP) layers, all with experts."""

    def expert_prefixes(self) -> list[tuple[str, str]]:
        """Return :func:`expert_prefixes` of each layer with experts."""
        behind = range(self.num_layers, self.num_layers + self.mtp_layers)
        return [
            *map(expert_prefixes, sorted(self.moe_layers)),
            *(
                (f"{_mtp_prefix(number)}{_INNER}mlp.experts.", expert_prefixes(layer)[1])
                for number, layer in enumerate(behind)
            ),
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Names of one model family."""

    name: str
    """``model_type`` in ``config.json``."""
    architecture: str
    """Class name in transformers."""
    settings: Settings
    """Settings that neither names nor shapes of tensors tell."""
    model: tuple[NamePair, ...]
    """Tensors outside of layers."""
    layer: tuple[NamePair, ...]
    """Tensors of every layer, after ``decoder.layers.N.`` and ``model.layers.N.``, as below."""
    dense: tuple[NamePair, ...]
    """Tensors of layers without experts."""
    moe: tuple[NamePair, ...]
    """Non-expert tensors of layers with experts."""
    mtp: tuple[NamePair, ...] = ()
    """Tensors of MTP layers after ``mtp.layers.N.``, besides their inner layer; may be empty."""
    mtp_copies: Mapping[str, str] = field(default_factory=dict)
    """Names of model tensors duplicated in each MTP layer -> names of the copies."""

    def pairs(self, anatomy: Anatomy) -> Iterator[NamePair]:
        """Yield the full names of every non-expert tensor of a model, layer by layer."""
        behind = range(anatomy.num_layers, anatomy.num_layers + anatomy.mtp_layers * bool(self.mtp))
        for one in (one for one in self.model if _has(anatomy, one)):
            copy = self.mtp_copies.get(one.hf[0])
            copies = (f"model.layers.{layer}.{copy}" for layer in behind if copy)
            yield replace(one, hf=(*one.hf, *copies))
        for number in range(anatomy.num_layers):
            of_kind = self.moe if number in anatomy.moe_layers else self.dense
            for one in (*self.layer, *of_kind):
                if _has(anatomy, one):
                    yield one.behind(f"decoder.layers.{number}.", f"model.layers.{number}.")
        for number, layer in enumerate(behind):
            for one in self.mtp:
                yield one.behind(_mtp_prefix(number), f"model.layers.{layer}.")
            for one in (*self.layer, *self.moe):
                if _has(anatomy, one):
                    yield one.behind(f"{_mtp_prefix(number)}{_INNER}", f"model.layers.{layer}.")


def expert_prefixes(layer: int) -> tuple[str, str]:
    """Return the prefixes of a layer's experts in Megatron and in transformers."""
    return f"decoder.layers.{layer}.mlp.experts.", f"model.layers.{layer}.mlp.experts."


_INNER = "transformer_layer."
"""Name of the inner layer of an MTP layer in sharded state dicts."""


def _mtp_prefix(number: int) -> str:
    return f"mtp.layers.{number}."


def _has(anatomy: Anatomy, pair: NamePair) -> bool:
    return pair.when is None or pair.when in anatomy.traits


def _same(megatron: str | tuple[str, str], hf: str, when: Trait | None = None) -> NamePair:
    names = (megatron,) if isinstance(megatron, str) else megatron
    return NamePair(megatron=names, hf=(hf,), when=when)


def _gate_up(megatron: str, hf: str, when: Trait | None = None) -> NamePair:
    both = (f"{hf}gate_proj.weight", f"{hf}up_proj.weight")
    return NamePair(megatron=(megatron,), hf=both, form="gate_up", when=when)


_MODEL = (
    _same("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
    _same("decoder.final_layernorm.weight", "model.norm.weight"),
    _same("output_layer.weight", "lm_head.weight", "untied"),
)
_OFF = (
    "apply_residual_connection_post_layernorm", "attention_output_gate",
    "heterogeneous_block_specs", "layernorm_zero_centered_gamma", "moe_apply_probs_on_input",
    "qk_l2_norm", "rotary_interleaved", "use_mup",
)  # fmt: skip
_ABSENT = (
    "activation_func_clamp_value", "moe_shared_expert_glu_interleave_size", "no_rope_freq",
    "window_size",
)  # fmt: skip
_SETTINGS: Settings = {
    "glu_linear_offset": (0.0, None),
    "position_embedding_type": ("rope", "yarn"),
    "rotary_percent": (1.0, None),
    "softmax_type": ("vanilla", None),
    **dict.fromkeys(_OFF, (False, None)),
    **dict.fromkeys(_ABSENT, (None,)),
}
_DENSE = (
    _gate_up("mlp.linear_fc1.weight", "mlp."),
    _same("mlp.linear_fc2.weight", "mlp.down_proj.weight"),
)
_ROUTER = _same("mlp.router.weight", "mlp.gate.weight")
_FUSED_NORM = "mlp.linear_fc1.layer_norm_weight"
_NORM = "pre_mlp_layernorm.weight"

# Megatron's own layers with plain attention save the norm before experts as if it were fused into
# a dense MLP (gpt_layer_specs.py, sharded_state_dict_keys_map)
_QWEN3_MOE = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    settings={
        **_SETTINGS,
        "softmax_scale": (None,),
        "moe_router_score_function": ("softmax", None),
        "moe_router_num_groups": (None, 1),
        "moe_router_topk_scaling_factor": (None, 1.0),
    },
    model=_MODEL,
    layer=(
        _same("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
        NamePair(
            megatron=("self_attention.linear_qkv.weight",),
            hf=("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
            form="qkv",
        ),
        _same("self_attention.q_layernorm.weight", "self_attn.q_norm.weight"),
        _same("self_attention.k_layernorm.weight", "self_attn.k_norm.weight"),
        _same("self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
    ),
    dense=(_same(_FUSED_NORM, "post_attention_layernorm.weight"), *_DENSE),
    moe=(_same((_NORM, _FUSED_NORM), "post_attention_layernorm.weight"), _ROUTER),
)

_DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    # softmax: DeepSeek-V2, whose tensors have the same names
    settings={**_SETTINGS, "moe_router_score_function": ("sigmoid", "softmax")},
    model=_MODEL,
    layer=(
        _same("input_layernorm.weight", "input_layernorm.weight"),
        _same("self_attention.linear_q_proj.weight", "self_attn.q_proj.weight", "no_query_lora"),
        _same(
            "self_attention.linear_q_down_proj.weight", "self_attn.q_a_proj.weight", "query_lora"
        ),
        _same(
            (
                "self_attention.linear_q_up_proj.layer_norm_weight",
                "self_attention.q_layernorm.weight",
            ),
            "self_attn.q_a_layernorm.weight",
            "query_lora",
        ),
        _same("self_attention.linear_q_up_proj.weight", "self_attn.q_b_proj.weight", "query_lora"),
        _same("self_attention.linear_kv_down_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"),
        _same(
            (
                "self_attention.linear_kv_up_proj.layer_norm_weight",
                "self_attention.kv_layernorm.weight",
            ),
            "self_attn.kv_a_layernorm.weight",
        ),
        _same("self_attention.linear_kv_up_proj.weight", "self_attn.kv_b_proj.weight"),
        _same("self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
    ),
    dense=(_same((_FUSED_NORM, _NORM), "post_attention_layernorm.weight"), *_DENSE),
    moe=(
        _same(_NORM, "post_attention_layernorm.weight"),
        _ROUTER,
        _same("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias", "expert_bias"),
        _gate_up("mlp.shared_experts.linear_fc1.weight", "mlp.shared_experts.", "shared_experts"),
        _same(
            "mlp.shared_experts.linear_fc2.weight",
            "mlp.shared_experts.down_proj.weight",
            "shared_experts",
        ),
    ),
    mtp=(  # eh_proj: embedding columns precede hidden-state columns on both sides
        _same("enorm.weight", "enorm.weight"),
        _same("hnorm.weight", "hnorm.weight"),
        _same("eh_proj.weight", "eh_proj.weight"),
        _same("final_layernorm.weight", "shared_head.norm.weight"),
    ),
    mtp_copies={
        "model.embed_tokens.weight": "embed_tokens.weight",
        "lm_head.weight": "shared_head.head.weight",
    },
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {family.name: family for family in (_QWEN3_MOE, _DEEPSEEK_V3)}
)


def family_of(has_latent_attention: bool) -> Family:
    """Return the family of models with or without multi-latent attention."""
    return _DEEPSEEK_V3 if has_latent_attention else _QWEN3_MOE
