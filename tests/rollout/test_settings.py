"""Models that Hugging Face's code computes otherwise are not exported under its names."""

import inspect
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch

from moe_optim.errors import ConfigError
from moe_optim.rollout.families import FAMILIES, family_of

pytest.importorskip("megatron.core")

COMMON = dict(
    num_layers=2, hidden_size=64, num_attention_heads=4, num_moe_experts=4, add_bias_linear=False,
    gated_linear_unit=True, activation_func=torch.nn.functional.silu, moe_router_topk=2,
    normalization="RMSNorm", qk_layernorm=True, num_query_groups=2,
)  # fmt: skip
OTHER = {
    "activation_func": torch.nn.functional.gelu,
    "activation_func_clamp_value": 7.0,
    "apply_residual_connection_post_layernorm": True,
    "attention_output_gate": True,
    "glu_linear_offset": 1.0,
    "heterogeneous_block_specs": True,
    "layernorm_zero_centered_gamma": True,
    "moe_apply_probs_on_input": True,
    "moe_shared_expert_glu_interleave_size": 8,
    "no_rope_freq": 4,
    "qk_l2_norm": True,
    "rotary_interleaved": True,
    "softmax_type": "off-by-one",
    "use_mup": True,
    "window_size": (128, 0),
}
"""Values with which weights of the same names and shapes mean something else."""
OTHER_QWEN = {
    "softmax_scale": 0.5,
    "moe_router_num_groups": 2,
    "moe_router_score_function": "sigmoid",
    "moe_router_topk_scaling_factor": 2.5,
}
OTHER_DEEPSEEK = {"moe_router_score_function": "sqrtsoftplus"}
OTHER_MODEL = {"position_embedding_type": "none", "rotary_percent": 0.5}


def config_of(family):
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    if family == "qwen3_moe":
        return TransformerConfig(**COMMON)
    return MLATransformerConfig(**COMMON, moe_router_score_function="sigmoid")


def check(config, **model):
    from moe_optim.rollout.dense import require_plain_model

    require_plain_model(SimpleNamespace(config=config, **model))


CASES = [
    *((family, name, value) for family in FAMILIES for name, value in OTHER.items()),
    *(("qwen3_moe", name, value) for name, value in OTHER_QWEN.items()),
    *(("deepseek_v3", name, value) for name, value in OTHER_DEEPSEEK.items()),
]


@pytest.mark.parametrize(("family", "name", "value"), CASES)
def test_a_setting_that_no_weight_tells_of_is_refused_by_name(family, name, value):
    config = config_of(family)
    check(config)
    setattr(config, name, value)
    with pytest.raises(ConfigError, match=f"transformers computes as {family}, got {name} "):
        check(config)


@pytest.mark.parametrize(("name", "value"), OTHER_MODEL.items())
def test_a_setting_of_the_model_itself_is_refused_by_name(name, value):
    config = config_of("qwen3_moe")
    check(config, position_embedding_type="yarn", rotary_percent=1.0)
    with pytest.raises(ConfigError, match=f"got {name} "):
        check(config, **{name: value})


def test_settings_are_those_of_megatron_and_each_is_tested():
    from megatron.core.models.gpt import GPTModel

    of_model = set(inspect.signature(GPTModel.__init__).parameters)
    for family, others in (("qwen3_moe", OTHER_QWEN), ("deepseek_v3", OTHER_DEEPSEEK)):
        settings = family_of(family == "deepseek_v3").settings
        known = {field.name for field in fields(config_of(family))} | of_model
        assert set(settings) <= known
        assert {*settings, "activation_func"} == {*OTHER, *OTHER_MODEL, *others}
