"""slime's and miles' training actors train, sleep, wake up and send their weights, whole.

``SLIME_PATH`` and ``MILES_PATH`` name their checkouts. Ray, engines and what saves GPU memory are
stood in for. slime loads the weights from Hugging Face's files, miles draws them.
"""

import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.support.bytes import assert_same_tensors
from tests.support.ranks import run_ranks
from tests.support.training_runs.actors import run_actor, values_of
from tests.upstream.conftest import CHECKOUTS

RANKS, ROLLOUTS = 2, 2
FLAGS = shlex.split("""
--spec actors layers --custom-megatron-init-path actors.install --transformer-impl local
--num-layers 2 --hidden-size 64 --ffn-hidden-size 96 --moe-ffn-hidden-size 96
--num-attention-heads 4 --group-query-attention --num-query-groups 2 --kv-channels 16
--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --qk-layernorm --swiglu
--disable-bias-linear --normalization RMSNorm --norm-epsilon 1e-6 --position-embedding-type rope
--rotary-base 10000 --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-swiglu-fusion
--no-persist-layer-norm --no-rope-fusion --init-method-std 0.2 --seq-length 64
--max-position-embeddings 64 --micro-batch-size 1 --lr 1e-2 --lr-decay-style constant
--weight-decay 0.1 --clip-grad 0 --tokenizer-type NullTokenizer --vocab-size 63
--make-vocab-size-divisible-by 32 --distributed-backend gloo --ckpt-format torch_dist
--rollout-batch-size 8 --n-samples-per-prompt 1 --num-rollout 4 --num-gpus-per-node 8 --colocate
--actor-num-nodes 1 --actor-num-gpus-per-node 2 --advantage-estimator grpo --eps-clip 0.2
--data-pad-size-multiplier 8 --update-weight-buffer-size 100000
""")


@pytest.fixture(scope="module")
def hf_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with Hugging Face's files of the model that the flags describe."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        hidden_size=64, intermediate_size=96, moe_intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=4,
        num_experts_per_tok=2, vocab_size=64, rope_theta=10000.0, rms_norm_eps=1e-6,
        tie_word_embeddings=False, initializer_range=0.2,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("qwen3_moe")
    Qwen3MoeForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


def _run(
    launcher: str, folder: Path, knobs: dict[str, Any] | None, *flags: str
) -> list[dict[str, Any]]:
    grouped = [] if knobs is None else ["--moe-grouped-gemm"]
    flags = (*FLAGS, "--hf-checkpoint", str(folder), "--load", str(folder), *grouped, *flags)
    return run_ranks(
        RANKS, run_actor, launcher, CHECKOUTS[launcher], flags, knobs, ROLLOUTS,
        timeout_s=600, shares_device=False,
    )  # fmt: skip


def test_bf16_experts_train_and_are_sent_as_by_stock(launcher: str, hf_checkpoint: Path):
    """Losses of all steps, and every tensor that the engines receive."""
    ours = _run(launcher, hf_checkpoint, {"format": "bf16", "expert_layout": "indexed"})
    for rank, stock in zip(ours, _run(launcher, hf_checkpoint, None), strict=True):
        assert rank["losses"] == stock["losses"]
        assert len(rank["losses"]) == 2 * ROLLOUTS
        assert_same_tensors(rank["sent"], stock["sent"], what="sent")


def test_quantized_experts_are_sent_in_bf16_with_the_values_they_have(
    launcher: str, hf_checkpoint: Path
):
    """Each of two ranks has two of the four experts, and sends all of them to its engine."""
    knobs = {"format": "mxfp8_2d", "expert_layout": "indexed"}
    for rank in _run(launcher, hf_checkpoint, knobs, "--expert-model-parallel-size", "2"):
        assert_same_tensors(rank["sent"], values_of(rank["exported"]), what="sent")


MILES = pytest.mark.skipif(not CHECKOUTS["miles"], reason="MILES_PATH names no checkout")
FROM_MASTERS = [f"--{check}rematerialize-param-from-master-weight" for check in ("", "check-")]


@MILES
def test_miles_restores_bf16_experts_from_their_masters(hf_checkpoint: Path):
    """It compares hashes of all weights, and sends what it sends of copies on the host."""
    knobs = {"format": "bf16", "expert_layout": "indexed"}
    copied = _run("miles", hf_checkpoint, knobs)
    for rank, kept in zip(_run("miles", hf_checkpoint, knobs, *FROM_MASTERS), copied, strict=True):
        assert rank["losses"] == kept["losses"]
        assert_same_tensors(rank["sent"], kept["sent"], what="sent")


@MILES
def test_miles_is_refused_quantized_experts_in_place_of_their_copies(hf_checkpoint: Path):
    """Ranks that receive tensors in bf16 would take their bytes for values."""
    knobs = {"format": "mxfp8_2d", "expert_layout": "indexed"}
    with pytest.raises(AssertionError, match=r"StateError: .*dequantize\(\)"):
        _run("miles", hf_checkpoint, knobs, *FROM_MASTERS, "--expert-model-parallel-size", "2")
