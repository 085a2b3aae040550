"""Buffers on the host and back: weights are what they were, and training goes on to the bit."""

from typing import Any

import pytest
import torch

from tests.support import life_cycle, making_room
from tests.support.bytes import assert_same_tensors
from tests.support.ranks import run_ranks

TRAIN = [("zero", {}), ("micro", {"seed": 1, "last": True}), ("step", {})]
WAYS = {
    "megatron": ("make_room",),
    "megatron, gradients too": ("offload", "make_room", "reload"),
    "verl": ("send_all_away", "bring_back"),
}


def _take_turns(way: str, knobs: dict[str, Any]) -> int:
    """Train on both sides of the way; the life cycle compares everything to plain torch."""
    life_cycle.initialize()
    cycle = life_cycle.LifeCycle(**knobs)
    for turn in range(2):
        for name, arguments in (*TRAIN, *((call, {}) for call in WAYS[way]), *TRAIN):
            getattr(cycle, name)(**arguments)
            cycle.check()
        cycle.evaluate(seed=turn)
    return len(making_room.all_buffers([cycle.ddp]))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "knobs",
    [
        {"format": "bf16", "step": "stock"},
        {"format": "bf16", "step": "fused"},
        {"format": "mxfp8", "step": "stock"},
        {"format": "nvfp4", "step": "fused", "overlap": False},
        {"format": "fp8_block", "step": "stock", "wire": "bf16"},
    ],
    ids=lambda knobs: " ".join(map(str, knobs.values())),
)
def test_training_goes_on_to_the_bit_after_all_buffers_were_on_the_host(way, knobs):
    """Dense weights and quantized ones; Megatron's calls keep gradients where these stay."""
    assert min(run_ranks(1, _take_turns, way, knobs)) > 1


def _offload_plain_buffers() -> dict[str, torch.Tensor]:
    """Have Megatron's own buffers on the host, without the plug-in; memory is used meanwhile."""
    life_cycle.initialize()
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        param_and_grad_buffer,
    )
    from megatron.core.transformer import MegatronModule, TransformerConfig

    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=1, bf16=True)
    model = MegatronModule(config=config)
    for name, dtype in (("narrow", torch.bfloat16), ("wide", torch.float32)):
        model.add_module(name, torch.nn.Linear(32, 32, dtype=dtype))
    ddp = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(use_distributed_optimizer=True, bucket_size=1),
        model,
    )
    buffers = making_room.all_buffers([ddp])
    assert {type(buffer) for buffer in buffers} == {param_and_grad_buffer._ParamAndGradBuffer}
    for number, param in enumerate(ddp.parameters()):
        param.main_grad.fill_(number + 1)
    before = {name: param.detach().clone() for name, param in ddp.named_parameters()}
    for buffer in buffers:
        buffer.offload_to_cpu(move_grads=False)
    junk = [torch.full((n,), torch.nan) for n in (16, 512, 1024, 2048) for _ in range(50)]
    for buffer in buffers:
        buffer.reload_from_cpu(move_grads=False)
    del junk
    after = {name: param.detach() for name, param in ddp.named_parameters()}
    assert_same_tensors(after, before)
    for number, param in enumerate(ddp.parameters()):
        assert torch.equal(param.main_grad, torch.full_like(param.main_grad, number + 1))
    return before


def test_megatrons_own_buffers_come_back_on_the_cpu_runtime():
    (weights,) = run_ranks(1, _offload_plain_buffers)
    assert len(weights) == 4
