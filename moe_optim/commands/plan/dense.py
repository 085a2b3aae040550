"""Parameters of everything but experts, counted from Megatron's flags for each pipeline stage.

Equal to the parameters of Megatron's GPT model, on one rank of tensor parallelism.
"""

import argparse

from moe_optim.commands.plan.stages import count_layers, count_moe_layers
from moe_optim.errors import ConfigError
from moe_optim.formats import round_up

_BF16, _MASTER = 2, 4  # bytes


def count_dense(args: argparse.Namespace) -> list[int]:
    """Return the parameters of each stage outside of experts, on one rank.

    Raises:
        ConfigError: the vocabulary is unknown, or attention is of a kind that is not counted.
    """
    _check(args)
    hidden, mtp = args.hidden_size, args.mtp_num_layers or 0
    attention, norm = _attention(args), _norm(args, hidden)
    dense = attention + 2 * norm + _mlp(args, args.ffn_hidden_size)
    moe = attention + 2 * norm + _router_and_shared(args)
    stages = [
        dense * (layers - sum(chunks)) + moe * sum(chunks)
        for layers, chunks in zip(count_layers(args), count_moe_layers(args), strict=True)
    ]
    stages[-1] += norm + mtp * (3 * norm + 2 * hidden * hidden // args.tensor_model_parallel_size)
    embedding = _vocabulary(args) * hidden // args.tensor_model_parallel_size
    positions = 0
    if args.add_position_embedding and args.position_embedding_type == "learned_absolute":
        positions = (args.max_position_embeddings or 0) * hidden
    stages[0] += embedding + positions
    is_tied = not args.untie_embeddings_and_output_weights
    # With pipeline stages, the last one holds copies of the embeddings that it uses
    if len(stages) > 1 and mtp:
        stages[-1] += embedding + positions
    if not is_tied or len(stages) > 1:
        stages[-1] += embedding
    return stages


def dense_bytes(
    numel: int, ranks: int, *, grad_bytes: int, moment_bytes: int, master_bytes: int = _MASTER
) -> int:
    """Return the bytes of ``numel`` parameters whose states ``ranks`` ranks divide.

    Weights take 2 bytes: in bf16, or in FP8 in both directions.
    """
    states = -(-numel // ranks) * (master_bytes + moment_bytes)
    return numel * (_BF16 + grad_bytes) + states


def _check(args: argparse.Namespace) -> None:
    others = {
        "--experimental-attention-variant": args.experimental_attention_variant is not None,
        "--attention-output-gate": args.attention_output_gate,
        "--linear-attention-freq": args.linear_attention_freq is not None,
    }
    if found := [flag for flag, is_set in others.items() if is_set]:
        raise ConfigError(f"attention of {', '.join(found)} is not counted")
    if args.num_attention_heads is None:
        raise ConfigError("--num-attention-heads is not given")
    if args.padded_vocab_size is None and args.vocab_size is None:
        raise ConfigError("neither --vocab-size nor --padded-vocab-size is given")


def _norm(args: argparse.Namespace, size: int) -> int:
    return size if args.normalization == "RMSNorm" else 2 * size


def _linear(
    args: argparse.Namespace, rows: int, cols: int, *, bias: bool, splits_rows: bool
) -> int:
    """Return the parameters of a linear on one rank; a bias is split as the rows are."""
    tensor: int = args.tensor_model_parallel_size
    return rows * cols // tensor + bias * (rows // tensor if splits_rows else rows)


def _attention(args: argparse.Namespace) -> int:
    if args.multi_latent_attention:
        return _latent_attention(args)
    hidden, heads, bias = args.hidden_size, args.num_attention_heads, args.add_bias_linear
    width = args.kv_channels or hidden // heads
    groups = args.num_query_groups if args.group_query_attention else heads
    rows, has_bias = (heads + 2 * groups) * width, bias or args.add_qkv_bias
    qkv = _linear(args, rows, hidden, bias=has_bias, splits_rows=True)
    out = _linear(args, hidden, heads * width, bias=bias, splits_rows=False)
    norms = 2 * _norm(args, width) if args.qk_layernorm else 0
    sinks = heads // args.tensor_model_parallel_size if args.softmax_type == "learnable" else 0
    return qkv + out + norms + sinks


def _latent_attention(args: argparse.Namespace) -> int:
    """Count MLA; every rank holds the down projections, as Transformer Engine's modules do."""
    hidden, heads, latent = args.hidden_size, args.num_attention_heads, args.kv_lora_rank
    query = heads * (args.qk_head_dim + args.qk_pos_emb_head_dim)
    key_value = heads * (args.qk_head_dim + args.v_head_dim)
    norms = [latent] if args.q_lora_rank is None else [latent, args.q_lora_rank]
    down = hidden * (latent + args.qk_pos_emb_head_dim + (args.q_lora_rank or 0))
    shared = (args.q_lora_rank or hidden) * query + latent * key_value
    cols, bias = heads * args.v_head_dim, args.add_bias_linear
    out = _linear(args, hidden, cols, bias=bias, splits_rows=False)
    kept = sum(_norm(args, size) for size in norms) if args.qk_layernorm else 0
    return int(down + shared // args.tensor_model_parallel_size + out + kept)


def _mlp(args: argparse.Namespace, width: int | None) -> int:
    width, hidden, bias = width or 4 * args.hidden_size, args.hidden_size, args.add_bias_linear
    rows = 2 * width if args.swiglu or args.quick_geglu else width
    up = _linear(args, rows, hidden, bias=bias, splits_rows=True)
    return up + _linear(args, hidden, width, bias=bias, splits_rows=False)


def _router_and_shared(args: argparse.Namespace) -> int:
    router: int = args.num_experts * (args.hidden_size + args.add_bias_linear)
    if args.moe_shared_expert_intermediate_size is None:
        return router
    gate = args.hidden_size if args.moe_shared_expert_gate else 0
    return router + gate + _mlp(args, args.moe_shared_expert_intermediate_size)


def _vocabulary(args: argparse.Namespace) -> int:
    """Return the padded size of the vocabulary, by ``vocab_size_with_padding``."""
    if args.padded_vocab_size is not None:
        return int(args.padded_vocab_size)
    own = args.vocab_size + (args.tokenizer_type == "NullTokenizer")  # and one that ends documents
    return round_up(own, args.make_vocab_size_divisible_by * args.tensor_model_parallel_size)
