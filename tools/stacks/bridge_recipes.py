"""Recipes of Megatron-Bridge, made so small that CPU ranks, or one GPU, train them.

Configurations of models, which recipes take from a hub, are answered here.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

SEQUENCE = 32
GLOBAL_BATCH = 4

_COMMON: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "dtype": "bfloat16",
}
_QWEN3_MOE = _COMMON | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_DEEPSEEK_V3 = _COMMON | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "scoring_func": "sigmoid",
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_nextn_predict_layers": 1,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4,
        "original_max_position_embeddings": 32,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "aux_loss_alpha": 0.001,
}
_KIMI_K2 = _DEEPSEEK_V3 | {
    "architectures": ["KimiK2ForCausalLM"],
    "n_group": 1,
    "num_nextn_predict_layers": 0,
}
_ON_GPU: Mapping[str, int] = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "moe_intermediate_size": 256,
    "head_dim": 64,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
}
"""Sizes that blockwise FP8 and fused attention of Transformer Engine take."""


@dataclass(frozen=True)
class Recipe:
    """A recipe function, and the configuration of its model that a hub would send, shrunken."""

    module: str
    function: str
    hf_class: str
    hf_values: Mapping[str, Any]

    def hf_config(self, on_gpu: bool = False) -> Any:
        """Return the model's configuration as transformers has it; on GPUs its blocks are whole."""
        transformers = importlib.import_module("transformers")
        sizes = {name: _ON_GPU[name] for name in self.hf_values.keys() & _ON_GPU.keys()}
        return getattr(transformers, self.hf_class)(**self.hf_values | (sizes if on_gpu else {}))


_RECIPES = "megatron.bridge.recipes"
RECIPES: Mapping[str, Recipe] = {
    "Qwen3-30B-A3B": Recipe(
        f"{_RECIPES}.qwen.h100.qwen3_moe",
        "qwen3_30b_a3b_pretrain_8gpu_h100_bf16_config",
        "Qwen3MoeConfig",
        _QWEN3_MOE,
    ),
    "DeepSeek-V3": Recipe(
        f"{_RECIPES}.deepseek.h100.deepseek_v3",
        "deepseek_v3_pretrain_1024gpu_h100_bf16_config",
        "DeepseekV3Config",
        _DEEPSEEK_V3,
    ),
    "Kimi-K2": Recipe(
        f"{_RECIPES}.kimi.h100.kimi_k2",
        "kimi_k2_pretrain_512gpu_h100_bf16_config",
        "DeepseekV3Config",
        _KIMI_K2,
    ),
}

_FUSED = (
    "moe_permute_fusion", "moe_router_fusion", "bias_activation_fusion", "masked_softmax_fusion",
    "apply_rope_fusion", "persist_layer_norm", "bias_dropout_fusion",
    "gradient_accumulation_fusion", "moe_shared_expert_overlap",
)  # fmt: skip


def read_recipe(
    recipe: Recipe, ranks: int, folder: Path, iterations: int, on_gpu: bool = False
) -> Any:
    """Return the recipe's ``ConfigContainer``, small.

    On a CPU its layers are those of the local spec, on GPUs Transformer Engine's. Checkpoints are
    saved to ``folder`` every half of the iterations, and an evaluation follows them. Experts are
    cut over the ranks.
    """
    bridge: Any = importlib.import_module("megatron.bridge").AutoBridge
    given = recipe.hf_config(on_gpu)
    bridge.from_hf_pretrained = classmethod(lambda cls, *_, **__: cls.from_hf_config(given))
    config = getattr(importlib.import_module(recipe.module), recipe.function)()
    _shrink_model(config.model, ranks)
    _shrink_run(config, folder, iterations)
    if on_gpu:
        config.model.gradient_accumulation_fusion = False  # needs apex
        config.model.deterministic_mode = True
    else:
        _train_local_layers(config)
    return config


def keep_weights_in_blockwise_fp8(config: Any) -> None:
    """Let Transformer Engine quantize weights and GEMMs, and Megatron gather quantized weights."""
    precision: Any = importlib.import_module("megatron.bridge.training.mixed_precision")
    mixed = precision.get_mixed_precision_config("bf16_with_fp8_subchannel_scaling_mixed")
    mixed.fp8_param_gather = True
    config.mixed_precision = mixed


def _shrink_model(model: Any, ranks: int) -> None:
    model.tensor_model_parallel_size = model.pipeline_model_parallel_size = 1
    model.pipeline_model_parallel_layout = None
    vars(model).pop("_pipeline_model_parallel_layout_builder", None)
    model.expert_model_parallel_size, model.expert_tensor_parallel_size = ranks, 1
    model.sequence_parallel = False
    model.seq_length = SEQUENCE
    model.recompute_granularity = model.recompute_method = model.recompute_num_layers = None
    model.recompute_modules = None
    model.cross_entropy_loss_fusion, model.cross_entropy_fusion_impl = False, "native"
    model.moe_token_dispatcher_type, model.moe_flex_dispatcher_backend = "alltoall", None
    model.attention_dropout = model.hidden_dropout = 0.0
    model.vocab_size = None  # the tokenizer's
    model.make_vocab_size_divisible_by = 128


def _train_local_layers(config: Any) -> None:
    """Take Megatron's own layers, gloo, and no fused kernels."""
    model = config.model
    model.transformer_impl = "local"
    for name in _FUSED:
        if hasattr(model, name):
            setattr(model, name, False)
    specs = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    model.transformer_layer_spec = partial(
        specs.get_gpt_decoder_block_spec,
        use_transformer_engine=False,
        normalization=model.normalization,
    )
    config.dist.distributed_backend, config.dist.use_gloo_process_groups = "gloo", True


def _shrink_run(config: Any, folder: Path, iterations: int) -> None:
    config.tokenizer.tokenizer_type, config.tokenizer.tokenizer_model = "NullTokenizer", None
    config.tokenizer.vocab_size, config.tokenizer.hf_tokenizer_kwargs = 255, {}
    config.dataset.seq_length, config.dataset.num_workers = SEQUENCE, 0
    config.dataset.persistent_workers = False
    config.train.train_iters, config.train.micro_batch_size = iterations, 2
    config.train.global_batch_size = GLOBAL_BATCH
    config.validation.eval_interval, config.validation.eval_iters = iterations // 2, 1
    config.logger.log_interval, config.logger.tensorboard_dir = 1, None
    schedule, optimizer = config.scheduler, config.optimizer
    schedule.lr_warmup_iters, schedule.lr_decay_iters = 2, iterations
    optimizer.lr, optimizer.min_lr = 3e-3, 3e-4
    optimizer.clip_grad = 0.0  # a fused norm may differ in its last bit
    checkpoint = config.checkpoint
    checkpoint.save, checkpoint.save_interval = str(folder), iterations // 2
    config.comm_overlap = None
