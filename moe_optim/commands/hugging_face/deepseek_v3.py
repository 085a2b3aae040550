"""DeepSeek-V3: Megatron arguments and transformers' ``DeepseekV3Config``."""

import math
from typing import Any

from moe_optim.commands.hugging_face import family_rules as rules
from moe_optim.commands.hugging_face.family_rules import (
    MOST_LAYERS,
    FamilyRules,
    SharedValue,
    ValueKind,
    Values,
    kind_faults,
)

_LATENT_NORM_EPSILON = 1e-6  # fixed in the norms of q and kv in transformers' DeepseekV3Attention
_EXPERTS_PER_GROUP = 2  # scores per group that DeepseekV3TopkRouter sums

_YARN = (  # Megatron's argument, key of rope_scaling, Megatron's default
    ("rotary_scaling_factor", "factor", 1.0),
    ("original_max_position_embeddings", "original_max_position_embeddings", 4096),
    ("beta_fast", "beta_fast", 32),
    ("beta_slow", "beta_slow", 1),
    ("mscale", "mscale", 1.0),
    ("mscale_all_dim", "mscale_all_dim", 0.0),
)
WITHOUT_FLAG = frozenset({"original_max_position_embeddings", "beta_fast", "beta_slow"})
"""Megatron 0.19 arguments that no flag sets."""


def _mscale(factor: float, mscale: float) -> float:
    """Return the attention scale of YaRN (Peng et al., 2023, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _concentration(yarn: Values) -> float:
    """Return Megatron's factor of sine and cosine."""
    factor = yarn["rotary_scaling_factor"]
    return _mscale(factor, yarn["mscale"]) / _mscale(factor, yarn["mscale_all_dim"])


def _yarn_of(given: Values) -> dict[str, Any]:
    return {one: default if given.get(one) is None else given[one] for one, _, default in _YARN}


def _common_faults(arguments: Values, groups: int | None, chosen: int | None) -> list[str]:
    faults = []
    epsilon, topk = arguments["layernorm_epsilon"], arguments["moe_router_topk"]
    if epsilon != _LATENT_NORM_EPSILON:
        faults.append(
            f"layernorm_epsilon: expected {_LATENT_NORM_EPSILON}, which transformers gives the "
            f"norms of latent attention whatever is configured, got {epsilon}"
        )
    if groups and groups > 1 and topk != _EXPERTS_PER_GROUP * (chosen or 1):
        faults.append(
            f"moe_router_group_topk: expected half of moe_router_topk {topk}, as transformers "
            f"chooses groups by their {_EXPERTS_PER_GROUP} best experts, got {chosen}"
        )
    return faults


def _mtp_faults(name: str, layers: Any) -> list[str]:
    if layers is None or (type(layers) is int and 0 <= layers <= MOST_LAYERS):
        return []
    return [f"{name}: expected a number of layers, at most {MOST_LAYERS:,}, got another"]


def _argument_faults(given: Values) -> list[str]:
    groups, chosen = given.get("moe_router_num_groups"), given.get("moe_router_group_topk")
    faults = _common_faults(given, groups, chosen)
    faults += _mtp_faults("mtp_num_layers", given.get("mtp_num_layers"))
    experts = rules.experts_of_layers(given)
    if sorted(experts) != experts or not experts[-1]:
        faults.append("moe_layer_freq: expected dense layers before all others, got another order")
    shared = given.get("moe_shared_expert_intermediate_size")
    width = given["moe_ffn_hidden_size"]
    if not shared or shared % width:
        faults.append(
            "moe_shared_expert_intermediate_size: expected a multiple of moe_ffn_hidden_size "
            f"{width}, got {shared}"
        )
    yarn = _yarn_of(given)
    scale = _mscale(yarn["rotary_scaling_factor"], yarn["mscale_all_dim"])
    if given.get("rope_type") == "rope" and scale != 1:
        faults.append(
            f"mscale_all_dim: expected 0 with --rope-type rope, got {yarn['mscale_all_dim']}"
        )
    return faults


def _config_faults(config: Values) -> list[str]:
    arguments = {one.argument: config[one.key] for one in rules.SHARED}
    faults = _common_faults(arguments, config["n_group"], config["topk_group"])
    if config["q_lora_rank"] is None:
        faults.append(
            "q_lora_rank: expected a rank of queries, without which megatron-core 0.19 and later "
            "normalizes what queries are projected from once more, got null"
        )
    mtp = "num_nextn_predict_layers"
    faults += _mtp_faults(mtp, config.get(mtp))
    if config["first_k_dense_replace"] >= config["num_hidden_layers"]:
        faults.append("first_k_dense_replace: expected fewer than all layers, got others")
    if config["norm_topk_prob"] != (config["num_experts_per_tok"] > 1):
        faults.append("norm_topk_prob: expected true for more than one expert, got another")
    return faults + _scaling_faults(config["rope_scaling"])


def _scaling_faults(scaling: Values | None) -> list[str]:
    if scaling is None:
        return []
    if scaling["rope_type"] != "yarn":
        return ["rope_scaling: expected yarn or none, got another"]
    present: dict[str, ValueKind] = {key: "number" for _, key, _ in _YARN if key in scaling}
    if faults := kind_faults(scaling, present):
        return [f"rope_scaling: {fault}" for fault in faults]
    given = {one: scaling.get(key, default) for one, key, default in _YARN}
    if scaling.get("attention_factor", _concentration(given)) != _concentration(given):
        faults.append(f"attention_factor: expected {_concentration(given)}, got another")
    if scaling.get("truncate", True) is not True:
        faults.append("truncate: expected true, got another")
    faults += [
        f"{key}: expected {default}, for which Megatron has no flag, got {given[one]}"
        for one, key, default in _YARN
        if one in WITHOUT_FLAG and given[one] != default
    ]
    return [f"rope_scaling: {fault}" for fault in faults]


def _arguments_of(config: Values) -> dict[str, Any]:
    scaling, layers = config["rope_scaling"], range(config["num_hidden_layers"])
    yarn = {one: (scaling or {}).get(key, default) for one, key, default in _YARN}
    has_groups = (config["n_group"] or 1) > 1
    return {
        "multi_latent_attention": True,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_dtype": "fp32",
        "num_query_groups": config["num_attention_heads"],
        rules.UNTIED: not config["tie_word_embeddings"],
        "mtp_num_layers": config.get("num_nextn_predict_layers") or None,
        "moe_layer_freq": rules.layer_freq(i >= config["first_k_dense_replace"] for i in layers),
        "moe_shared_expert_intermediate_size": config["n_shared_experts"]
        * config["moe_intermediate_size"],
        "moe_router_topk_scaling_factor": config["routed_scaling_factor"],
        "moe_router_num_groups": config["n_group"] if has_groups else None,
        "moe_router_group_topk": config["topk_group"] if has_groups else None,
        "rope_type": "yarn" if scaling else "rope",
        **(yarn if scaling else {}),
    }


def _config_of(arguments: Values) -> dict[str, Any]:
    groups = arguments.get("moe_router_num_groups") or 1
    chosen = arguments.get("moe_router_group_topk") or 1
    return {
        "num_key_value_heads": arguments["num_attention_heads"],
        "first_k_dense_replace": rules.experts_of_layers(arguments).index(True),
        "n_shared_experts": arguments["moe_shared_expert_intermediate_size"]
        // arguments["moe_ffn_hidden_size"],
        "n_group": groups,
        "topk_group": chosen if groups > 1 else 1,
        "routed_scaling_factor": arguments.get("moe_router_topk_scaling_factor") or 1.0,
        "norm_topk_prob": arguments["moe_router_topk"] > 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": arguments.get("mtp_num_layers") or 0,
        "rope_scaling": _scaling_of(arguments),
        "rope_interleave": True,
    }


def _scaling_of(arguments: Values) -> dict[str, Any] | None:
    yarn = _yarn_of(arguments)
    if arguments.get("rope_type") == "rope" or yarn["rotary_scaling_factor"] == 1:
        return None
    scaling: dict[str, Any] = {"type": "yarn", "rope_type": "yarn"}
    scaling |= {key: yarn[one] for one, key, _ in _YARN}
    if not (scaling["mscale"] and scaling["mscale_all_dim"]):  # else transformers derives it
        scaling["attention_factor"] = _concentration(yarn)
    return scaling


DEEPSEEK_V3 = FamilyRules(
    family="deepseek_v3",
    shared=(
        *rules.SHARED,
        SharedValue("num_experts", "n_routed_experts"),
        SharedValue("q_lora_rank", "q_lora_rank", "count?"),
        SharedValue("kv_lora_rank", "kv_lora_rank"),
        SharedValue("qk_head_dim", "qk_nope_head_dim"),
        SharedValue("qk_pos_emb_head_dim", "qk_rope_head_dim"),
        SharedValue("v_head_dim", "v_head_dim"),
    ),
    argument_kinds={
        "moe_shared_expert_intermediate_size": "count",
        "moe_router_num_groups": "count?",
        "moe_router_group_topk": "count?",
        "moe_router_topk_scaling_factor": "number?",
        **dict.fromkeys((argument for argument, _, _ in _YARN), "number?"),
    },
    config_kinds={
        "n_shared_experts": "count",
        "n_group": "count?",
        "topk_group": "count?",
        "routed_scaling_factor": "number",
        "first_k_dense_replace": "number",
        "norm_topk_prob": "flag",
        "tie_word_embeddings": "flag",
    },
    arguments={
        **rules.arguments_of("deepseek_v3"),
        "moe_router_score_function": ("sigmoid",),
        "moe_router_enable_expert_bias": (True,),
        "mla_down_proj_fusion": (False, None),
        "mtp_use_repeated_layer": (False, None),
    },
    config={
        **rules.CONFIG,
        "rope_interleave": (True, None),
        "scoring_func": ("sigmoid", None),
        "topk_method": ("noaux_tc", None),
    },
    defaults={**rules.DEFAULTS, "norm_topk_prob": True, "q_lora_rank": 1536},
    argument_faults=_argument_faults,
    config_faults=_config_faults,
    arguments_of=_arguments_of,
    config_of=_config_of,
    traits_of=lambda arguments: frozenset(
        {
            "no_query_lora" if arguments["q_lora_rank"] is None else "query_lora",
            "expert_bias",
            "shared_experts",
        }
    ),
)
