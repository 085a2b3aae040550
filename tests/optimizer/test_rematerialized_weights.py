"""Weights whose bytes were dropped come back from the masters, by the calls that end a step.

miles' ``--rematerialize-param-from-master-weight`` makes these calls where it wakes up.
"""

import pytest
import torch

from moe_optim.weights.grouped_weight import GroupedWeight
from tests.support.ranks import on_ranks
from tests.support.states import life_cycle

TRAIN = [("zero", {}), ("micro", {"seed": 1, "last": True}), ("step", {})]
KNOBS = [
    {"format": "mxfp8", "step": "fused"},
    {"format": "nvfp4", "step": "stock"},
    {"format": "fp8_block", "step": "fused", "wire": "bf16"},
    {"format": "bf16", "step": "fused"},
]


def rematerialize(cycle: life_cycle.LifeCycle) -> None:
    """Cast masters and gather weights, as ``TensorBackuper.restore`` of miles."""
    for part in cycle.optimizer.chained_optimizers:
        part._copy_main_params_to_model_params()
    for chunk in [cycle.ddp]:
        chunk.start_param_sync(force_sync=True)


@torch.no_grad()
def drop_bytes(model: torch.nn.Module) -> None:
    """Overwrite all weights, of which the memory was given away."""
    for param in model.parameters():
        if isinstance(param, GroupedWeight):
            buffers = param.quantized_storage.quantized.buffers().values()
        else:
            buffers = [param.data]
        for buffer in buffers:
            buffer.copy_(torch.full_like(buffer.contiguous().view(torch.uint8), 0x5A)
                         .view(buffer.dtype).view(buffer.shape))  # fmt: skip


@pytest.mark.parametrize("knobs", KNOBS, ids=lambda knobs: " ".join(knobs.values()))
@on_ranks(2)
def test_every_byte_comes_back_from_the_masters(knobs):
    """Rowwise and columnwise; training goes on to the bit."""
    life_cycle.initialize()
    cycle = life_cycle.LifeCycle(overlap=False, **knobs)
    for _ in range(2):
        for name, arguments in TRAIN:
            getattr(cycle, name)(**arguments)
        cycle.check()
        drop_bytes(cycle.ddp)
        rematerialize(cycle)
        cycle.check()
