"""Groups of buckets without managed weights behave as Megatron's, whatever wraps the model."""

from typing import Any

import torch

from moe_optim.config import MoEOptimConfig
from tests.support.ranks import on_ranks, run_ranks
from tests.support.states import life_cycle
from tests.support.wrapping import layer_config, wrap

RANKS = 2
REDUCTIONS = {"when asked": False, "in the backward pass": True}
"""When gradients are reduced -> ``overlap_grad_reduce``."""


def _wrapped(**buffers: Any) -> Any:
    """Return two dense layers in Megatron's DDP, with the plug-in installed."""

    import moe_optim

    moe_optim.uninstall()
    moe_optim.install(MoEOptimConfig(format="mxfp8"))
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).bfloat16()
    return wrap(layer_config(8), layers, grad_reduce_in_fp32=False, **buffers)


def _backward(ddp: Any) -> None:
    rank = torch.distributed.get_rank()
    ddp(torch.full((4, 8), 1.0 + rank, dtype=torch.bfloat16)).sum().backward()


def _reduce_without_distributed_optimizer() -> dict[str, Any]:
    """Return, of every way to reduce, which gradients of two iterations are the mean."""
    life_cycle.initialize()
    found: dict[str, Any] = {}
    for name, overlap in REDUCTIONS.items():
        ddp = _wrapped(use_distributed_optimizer=False, overlap_grad_reduce=overlap)
        (group,) = ddp.bucket_groups
        found[name] = []
        for _ in range(2):
            ddp.zero_grad_buffer()
            with ddp.no_sync():
                _backward(ddp)
            own = [param.main_grad.clone() for param in ddp.parameters()]
            ddp.zero_grad_buffer()
            _backward(ddp)
            ddp.finish_grad_sync()
            for grad in own:
                torch.distributed.all_reduce(grad.div_(RANKS))
            equal = [
                torch.equal(param.main_grad, grad)
                for param, grad in zip(ddp.parameters(), own, strict=True)
            ]
            found[name].append((type(group).__name__, equal))
    return found


def test_models_without_a_distributed_optimizer_are_wrapped_and_reduced():
    """A teacher, say, beside the model that trains: every gradient is the mean over ranks."""
    for found in run_ranks(RANKS, _reduce_without_distributed_optimizer):
        assert found == {name: [("GroupedBucketGroup", [True] * 4)] * 2 for name in REDUCTIONS}


@on_ranks(1)
def test_a_first_pass_counts_once_it_has_reached_all_parameters():
    """One that was given up before is no measure of those to come; Megatron asserts there."""
    life_cycle.initialize()
    found = []
    for reached in (slice(1), slice(None)):
        ddp = _wrapped(use_distributed_optimizer=True, overlap_grad_reduce=True)
        (group,) = ddp.bucket_groups
        for param in list(group.params)[reached]:
            group.register_grad_ready(param)
        group.reset()
        found.append(group.is_first_batch)
    assert found == [True, False]
