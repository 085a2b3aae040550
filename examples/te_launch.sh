#!/usr/bin/env bash
# Trains an MoE GPT with Megatron-LM and Transformer Engine: blockwise FP8 GEMMs and weights.
# Start it in a checkout of Megatron-LM, on a machine with 8 Hopper GPUs.
set -euo pipefail

MODEL=(
    --transformer-impl transformer_engine
    --num-layers 16 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 16
    --seq-length 4096 --max-position-embeddings 4096 --position-embedding-type rope
    --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
)
EXPERTS=(
    --num-experts 64 --moe-ffn-hidden-size 768 --moe-router-topk 8
    --moe-token-dispatcher-type alltoall --moe-grouped-gemm --expert-model-parallel-size 4
)
PRECISION=(--bf16 --fp8-format e4m3 --fp8-recipe blockwise --fp8-param-gather)
TRAINING=(
    --micro-batch-size 1 --global-batch-size 256 --train-iters 1000
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 100 --clip-grad 1.0
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --no-gradient-accumulation-fusion
)
DATA=(--mock-data --tokenizer-type NullTokenizer --vocab-size 131071)
CHECKPOINTS=(
    --save checkpoints --load checkpoints --save-interval 500 --ckpt-format torch_dist
    --dist-ckpt-optim-fully-reshardable --eval-interval 500 --eval-iters 8 --log-interval 10
)

torchrun --nproc-per-node 8 pretrain_gpt.py \
    "${MODEL[@]}" "${EXPERTS[@]}" "${PRECISION[@]}" \
    "${TRAINING[@]}" "${DATA[@]}" "${CHECKPOINTS[@]}"
