"""Qwen3-MoE: Megatron arguments and transformers' ``Qwen3MoeConfig``."""

from typing import Any

from moe_optim.commands.hugging_face import family_rules as rules
from moe_optim.commands.hugging_face.family_rules import FamilyRules, SharedValue, Values


def _arguments_of(config: Values) -> dict[str, Any]:
    step, dense = config["decoder_sparse_step"], config["mlp_only_layers"] or ()
    layers = range(config["num_hidden_layers"])
    return {
        "group_query_attention": config["num_key_value_heads"] != config["num_attention_heads"],
        "num_query_groups": config["num_key_value_heads"],
        rules.UNTIED: not config["tie_word_embeddings"],
        "moe_router_pre_softmax": not config["norm_topk_prob"],
        "moe_layer_freq": rules.layer_freq(i not in dense and (i + 1) % step == 0 for i in layers),
    }


def _config_of(arguments: Values) -> dict[str, Any]:
    has_groups, heads = arguments.get("group_query_attention"), arguments["num_attention_heads"]
    experts = rules.experts_of_layers(arguments)
    return {
        "num_key_value_heads": (arguments.get("num_query_groups") if has_groups else None) or heads,
        "norm_topk_prob": arguments.get("moe_router_pre_softmax") is not True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer, has_experts in enumerate(experts) if not has_experts],
        "rope_scaling": None,
        "use_sliding_window": False,
    }


def _group_faults(heads: int, groups: int | None) -> list[str]:
    if groups and heads % groups:
        return [f"groups of queries: expected a divisor of {heads} heads, got {groups}"]
    return []


QWEN3_MOE = FamilyRules(
    family="qwen3_moe",
    shared=(
        *rules.SHARED,
        SharedValue("kv_channels", "head_dim"),
        SharedValue("num_experts", "num_experts"),
        SharedValue("moe_aux_loss_coeff", "router_aux_loss_coef", "number"),
    ),
    argument_kinds={"num_query_groups": "count?"},
    config_kinds={
        "num_key_value_heads": "count",
        "decoder_sparse_step": "count",
        "mlp_only_layers": "layers?",
        "norm_topk_prob": "flag",
        "tie_word_embeddings": "flag",
    },
    arguments={
        **rules.arguments_of("qwen3_moe"),
        "mtp_num_layers": (None, 0),
        "moe_router_enable_expert_bias": (False, None),
        "moe_shared_expert_intermediate_size": (None, 0),
    },
    config={**rules.CONFIG, "use_sliding_window": (False, None), "rope_scaling": (None,)},
    defaults={
        **rules.DEFAULTS,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": False,
        "router_aux_loss_coef": 0.001,
    },
    argument_faults=lambda given: _group_faults(
        given["num_attention_heads"], given.get("num_query_groups")
    ),
    config_faults=lambda config: _group_faults(
        config["num_attention_heads"], config["num_key_value_heads"]
    ),
    arguments_of=_arguments_of,
    config_of=_config_of,
)
