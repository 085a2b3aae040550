"""Which models are the same in both programs, and what stands in the way of others."""

import json
import shlex
import sys

import pytest

from moe_optim.commands.hugging_face.models import (
    megatron_flags,
    model_from_arguments,
    model_from_config,
)
from moe_optim.errors import ConfigError
from tests.support.checkpoints.hf_checkpoints import DEEPSEEK, QWEN
from tests.support.ranks import run_ranks

QWEN_ARGS, DEEPSEEK_ARGS = vars(QWEN), vars(DEEPSEEK)

PUBLISHED = {  # keys of the config.json of Qwen3-30B-A3B that decide on the model
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "num_experts": 128,
    "num_experts_per_tok": 8, "norm_topk_prob": True, "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0, "rope_scaling": None, "max_position_embeddings": 40960,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "hidden_act": "silu",
    "attention_bias": False, "tie_word_embeddings": False, "router_aux_loss_coef": 0.001,
    "use_sliding_window": False, "sliding_window": None, "initializer_range": 0.02,
}  # fmt: skip


def test_a_published_configuration_is_what_megatron_is_started_with():
    """The flags of Megatron-LM's example for Qwen3-30B-A3B."""
    model = model_from_config(PUBLISHED, "here")
    flags = " ".join(megatron_flags(model, "transformer_engine"))
    for flag in (
        "--num-layers 48", "--hidden-size 2048", "--num-attention-heads 32",
        "--group-query-attention --num-query-groups 4", "--kv-channels 128",
        "--num-experts 128", "--moe-router-topk 8", "--moe-ffn-hidden-size 768",
        "--rotary-base 1000000", "--norm-epsilon 1e-06", "--qk-layernorm",
        "--untie-embeddings-and-output-weights", "--padded-vocab-size 151936",
    ):  # fmt: skip
        assert f" {flag} " in f" {flags} "  # and no 1000000.0, which Megatron's parser refuses
    assert "--moe-router-pre-softmax" not in flags
    assert {**PUBLISHED, **model.config} == {**model.config, **PUBLISHED}


TRAIN = shlex.split("""
--micro-batch-size 1 --global-batch-size 2 --seq-length 32 --train-iters 2 --lr 1e-3 --bf16
--mock-data --tokenizer-type NullTokenizer --use-distributed-optimizer
""")


def _list_faults(command_lines: list[list[str]]) -> list[list[str]]:
    from megatron.training.arguments import parse_and_validate_args

    from moe_optim.integration import cpu_runtime, script_arguments
    from moe_optim.integration.preflight import list_faults

    cpu_runtime.install()
    script_arguments.import_error = lambda: None  # as if Transformer Engine were here
    found = []
    for flags in command_lines:
        sys.argv = ["script", *flags, *TRAIN]
        found.append(list_faults(parse_and_validate_args, sys.argv[1:]))
    return found


STARTED = {  # what the only faults tell of, where there is neither Transformer Engine nor a GPU
    ("qwen3_moe", "local"): [],
    ("qwen3_moe", "transformer_engine"): ["apply_rope_fusion is not available. Please install TE"],
    ("deepseek_v3", "local"): ["--transformer-impl local has no attention for it"],
    ("deepseek_v3", "transformer_engine"): [],
}


def test_flags_start_a_run_on_the_layers_that_they_name():
    """By Megatron's own checks of arguments and while it builds; what stays is what is not here."""
    pytest.importorskip("megatron.core")
    given = {"qwen3_moe": QWEN_ARGS, "deepseek_v3": DEEPSEEK_ARGS}
    models = {family: model_from_arguments(one, "") for family, one in given.items()}
    command_lines = [megatron_flags(models[family], impl) for family, impl in STARTED]
    (found,) = run_ranks(1, _list_faults, command_lines)
    for faults, expected in zip(found, STARTED.values(), strict=True):
        assert len(faults) == len(expected), faults
        assert all(words in fault for fault, words in zip(faults, expected, strict=True))


@pytest.mark.parametrize("given", [QWEN_ARGS, DEEPSEEK_ARGS], ids=["qwen3_moe", "deepseek_v3"])
def test_arguments_give_a_configuration_that_gives_them_back(given):
    model = model_from_arguments(given, "here")
    config = json.loads(json.dumps(model.config))
    back = model_from_config(config, "here")
    assert back.arguments == model.arguments
    assert back.anatomy == model.anatomy
    assert model_from_arguments(model.arguments, "there").config == model.config


def test_a_layer_with_experts_is_known_however_megatron_is_told():
    """``--moe-layer-freq 2``: layers 0, 2 and so on; transformers lists the others."""
    given = QWEN_ARGS | {"num_layers": 4, "moe_layer_freq": 2}
    model = model_from_arguments(given, "here")
    assert model.anatomy.moe_layers == {0, 2}
    assert model.config["mlp_only_layers"] == [1, 3]
    assert not model.is_stacked
    sparse = PUBLISHED | {"num_hidden_layers": 4, "decoder_sparse_step": 2}
    assert model_from_config(sparse, "here").anatomy.moe_layers == {1, 3}


def test_tied_embeddings_have_no_output_layer():
    untied = "untie_embeddings_and_output_weights"
    tied = model_from_arguments(QWEN_ARGS | {untied: False}, "here")
    assert tied.config["tie_word_embeddings"] is True
    names = [name for pair in tied.family.pairs(tied.anatomy) for name in pair.hf]
    assert "lm_head.weight" not in names


YARN = {
    "rope_type": "yarn",
    "rotary_scaling_factor": 40.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def test_stretched_positions_are_said_in_full():
    """With mscale_all_dim 0 the two programs derive other factors, so it is written out."""
    scaling = model_from_arguments(DEEPSEEK_ARGS | YARN, "here").config["rope_scaling"]
    assert scaling["factor"] == 40.0
    assert scaling["original_max_position_embeddings"] == 4096
    assert "attention_factor" not in scaling
    zero = model_from_arguments(DEEPSEEK_ARGS | YARN | {"mscale_all_dim": 0.0}, "here")
    assert zero.config["rope_scaling"]["attention_factor"] == pytest.approx(1.3688879, abs=1e-6)
    assert model_from_config(zero.config, "here").arguments == zero.arguments


REFUSED_ARGUMENTS = {
    "swiglu: expected True, got 1": {"swiglu": 1},
    "moe_router_score_function: expected softmax, got 'sigmoid'": {
        "moe_router_score_function": "sigmoid"
    },
    "use_mup: expected False, got True": {"use_mup": True},
    "layers: expected at most 4,096, got 5,000": {"num_layers": 5000},
    "moe_layer_freq: expected a number or 2 zeros and ones": {"moe_layer_freq": [1]},
    "groups of queries: expected a divisor of 4 heads, got 3": {"num_query_groups": 3},
}


REFUSED_LATENT = {
    "layernorm_epsilon: expected 1e-06, which transformers": {"layernorm_epsilon": 1e-5},
    "moe_router_group_topk: expected half of moe_router_topk 2": {
        **{"moe_router_num_groups": 3, "moe_router_group_topk": 2}
    },
    "moe_layer_freq: expected dense layers before all others": {"moe_layer_freq": [1, 0]},
    "moe_shared_expert_intermediate_size: expected a multiple of moe_ffn_hidden_size 8, got 9": {
        "moe_shared_expert_intermediate_size": 9
    },
    "mscale_all_dim: expected 0 with --rope-type rope, got 1.0": {
        **{"mscale_all_dim": 1.0, "rotary_scaling_factor": 4.0}
    },
}


def test_arguments_of_what_transformers_does_not_compute_are_refused_by_name():
    for said, changed in REFUSED_ARGUMENTS.items():
        with pytest.raises(ConfigError) as raised:
            model_from_arguments(QWEN_ARGS | changed, "CKPT")
        assert said in str(raised.value)
        assert str(raised.value).startswith("CKPT: expected arguments of a model that transformers")
    for said, changed in REFUSED_LATENT.items():
        with pytest.raises(ConfigError) as raised:
            model_from_arguments(DEEPSEEK_ARGS | changed, "CKPT")
        assert said in str(raised.value)


def test_queries_projected_at_once_are_said_to_transformers_and_refused_on_the_way_back():
    """A rank of null, written out. A file without the key means the 1536 of transformers."""
    from transformers import AutoConfig

    model = model_from_arguments(DEEPSEEK_ARGS | {"q_lora_rank": None}, "here")
    assert model.config["q_lora_rank"] is None
    assert "no_query_lora" in model.anatomy.traits and "query_lora" not in model.anatomy.traits
    with pytest.raises(ConfigError, match="q_lora_rank: expected a rank .* got null") as raised:
        model_from_config(model.config, "here")
    assert "megatron-core 0.19" in str(raised.value) and "1 difference(s)" in str(raised.value)
    left_out = {key: value for key, value in model.config.items() if key != "q_lora_rank"}
    default = AutoConfig.for_model("deepseek_v3").q_lora_rank
    assert model_from_config(left_out, "here").arguments["q_lora_rank"] == default == 1536


REFUSED_CONFIG = {
    "model_type: expected qwen3_moe or deepseek_v3, got 'llama'": {"model_type": "llama"},
    "quantization_config: expected None, got something else": {"quantization_config": {}},
    "mlp_only_layers: expected a list of layers, got [-1]": {"mlp_only_layers": [-1]},
    "rope_theta: expected a number, got nan": {"rope_theta": float("nan")},
}


def test_a_configuration_of_what_megatron_does_not_compute_is_refused_by_name():
    for said, changed in REFUSED_CONFIG.items():
        with pytest.raises(ConfigError) as raised:
            model_from_config(PUBLISHED | changed, "config.json")
        assert said in str(raised.value)


def test_keys_of_transformers_5_are_read_as_those_of_published_models():
    renamed = dict(PUBLISHED)
    renamed["num_local_experts"] = renamed.pop("num_experts")
    theta, _ = renamed.pop("rope_theta"), renamed.pop("rope_scaling")
    renamed["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    got = model_from_config(renamed, "here")
    assert got == model_from_config(PUBLISHED, "here")
