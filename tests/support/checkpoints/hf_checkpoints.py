"""Small whole models as files: what Megatron stores, and what transformers reads.

The names and shapes are written out, as Megatron 0.19.2 was seen to store them. Values are random
bits.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.support.checkpoints.stored_checkpoints import random_bits, write_torch_dist

QWEN = argparse.Namespace(
    num_layers=2, hidden_size=12, ffn_hidden_size=20, moe_ffn_hidden_size=8,
    num_attention_heads=4, group_query_attention=True, num_query_groups=2, kv_channels=6,
    num_experts=3, moe_router_topk=2, moe_layer_freq=1, padded_vocab_size=16,
    max_position_embeddings=64, layernorm_epsilon=1e-6, rotary_base=10000, init_method_std=0.02,
    attention_dropout=0.0, moe_aux_loss_coeff=1e-3, swiglu=True, qk_layernorm=True,
    normalization="RMSNorm", position_embedding_type="rope", add_bias_linear=False,
    untie_embeddings_and_output_weights=True, moe_router_score_function="softmax",
    moe_router_pre_softmax=False, rotary_percent=1.0,
)  # fmt: skip
DEEPSEEK = argparse.Namespace(
    **vars(QWEN)
    | {
        "num_layers": 2, "multi_latent_attention": True, "group_query_attention": False,
        "num_query_groups": 1, "q_lora_rank": 5, "kv_lora_rank": 7, "qk_head_dim": 4,
        "qk_pos_emb_head_dim": 2, "v_head_dim": 3, "rope_type": "rope", "moe_layer_freq": [0, 1],
        "moe_shared_expert_intermediate_size": 16, "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True, "moe_router_topk_scaling_factor": 2.5,
    }
)  # fmt: skip

ENDS = {
    "embedding.word_embeddings.weight": (16, 12),
    "decoder.final_layernorm.weight": (12,),
    "output_layer.weight": (16, 12),
}
QWEN_STORED = ENDS | {
    f"decoder.layers.{name}": (2, *shape)
    for name, shape in {
        "self_attention.linear_qkv.layer_norm_weight": (12,),
        "self_attention.linear_qkv.weight": (48, 12),
        "self_attention.q_layernorm.weight": (6,),
        "self_attention.k_layernorm.weight": (6,),
        "self_attention.linear_proj.weight": (12, 24),
        "pre_mlp_layernorm.weight": (12,),
        "mlp.router.weight": (3, 12),
        "mlp.experts.experts.linear_fc1.weight": (3, 16, 12),
        "mlp.experts.experts.linear_fc2.weight": (3, 12, 8),
    }.items()
}
_LATENT = {
    "input_layernorm.weight": (12,),
    "self_attention.linear_q_down_proj.weight": (5, 12),
    "self_attention.linear_q_up_proj.layer_norm_weight": (5,),
    "self_attention.linear_q_up_proj.weight": (24, 5),
    "self_attention.linear_kv_down_proj.weight": (9, 12),
    "self_attention.linear_kv_up_proj.layer_norm_weight": (7,),
    "self_attention.linear_kv_up_proj.weight": (28, 7),
    "self_attention.linear_proj.weight": (12, 12),
}
_DENSE = {
    "mlp.linear_fc1.layer_norm_weight": (12,),
    "mlp.linear_fc1.weight": (40, 12),
    "mlp.linear_fc2.weight": (12, 20),
}
_MOE = {
    "pre_mlp_layernorm.weight": (12,),
    "mlp.router.weight": (3, 12),
    "mlp.router.expert_bias": (3,),
    "mlp.shared_experts.linear_fc1.weight": (32, 12),
    "mlp.shared_experts.linear_fc2.weight": (12, 16),
    "mlp.experts.experts.linear_fc1.weight": (3, 16, 12),
    "mlp.experts.experts.linear_fc2.weight": (3, 12, 8),
}
DEEPSEEK_STORED = (
    ENDS
    | {f"decoder.layers.0.{name}": shape for name, shape in (_LATENT | _DENSE).items()}
    | {f"decoder.layers.1.{name}": shape for name, shape in (_LATENT | _MOE).items()}
)
MTP = "deepseek_v3 with multi-token prediction"
PREDICTING = argparse.Namespace(**vars(DEEPSEEK) | {"mtp_num_layers": 2})
_OF_MTP = {
    "enorm.weight": (12,),
    "hnorm.weight": (12,),
    "eh_proj.weight": (12, 24),
    "final_layernorm.weight": (12,),
    **{f"transformer_layer.{name}": shape for name, shape in (_LATENT | _MOE).items()},
}
PREDICTING_STORED = DEEPSEEK_STORED | {
    f"mtp.layers.{number}.{name}": shape for number in (0, 1) for name, shape in _OF_MTP.items()
}
AT_ONCE_STORED = {
    name: shape for name, shape in DEEPSEEK_STORED.items() if ".linear_q_" not in name
} | {f"decoder.layers.{n}.self_attention.linear_q_proj.weight": (24, 12) for n in (0, 1)}
"""Of a model without a rank of queries, as megatron-core 0.18 and older store it."""
STORED = {
    "qwen3_moe": (QWEN, QWEN_STORED),
    "deepseek_v3": (DEEPSEEK, DEEPSEEK_STORED),
    MTP: (PREDICTING, PREDICTING_STORED),
}
"""By family: Megatron's arguments, and the shape of every tensor that layers of Transformer Engine
are stored as."""


def stored_model(family: str) -> dict[str, torch.Tensor]:
    """Return what Megatron stores, random bits in bf16; the bias of experts is fp32, as there."""
    return random_model(STORED[family][1])


def random_model(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Return the same for any names and shapes."""
    return {
        name: random_bits(shape, torch.float32 if "bias" in name else torch.bfloat16, seed)
        for seed, (name, shape) in enumerate(shapes.items())
    }


def write_megatron(
    folder: Path,
    family: str,
    tensors: dict[str, torch.Tensor] | None = None,
    **arguments: Any,
) -> Path:
    """Write a checkpoint of a family as Megatron does, with other arguments where given."""
    args = argparse.Namespace(**{**vars(STORED[family][0]), **arguments})
    common = {"args": args, "checkpoint_version": 3.0, "iteration": 7}
    return write_torch_dist(folder, stored_model(family) if tensors is None else tensors, common)


def write_hf(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Path:
    """Write a folder as Hugging Face has it: one file, and ``config.json``."""
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder
