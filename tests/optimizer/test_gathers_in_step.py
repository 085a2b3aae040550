"""``--overlap-param-gather-with-optimizer-step``: the first chunk's gathers start within a step.

Hazard H15 of ``docs/faults-and-hazards.md``.
"""

import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from moe_optim.config import MoEOptimConfig
from moe_optim.integration import installation
from tests.support.bytes import assert_same_tensors
from tests.support.ranks import run_ranks
from tests.support.states.life_cycle import (
    QUANTIZED,
    WIDTH,
    initialize,
    make_layers,
    run_layers,
    tokens_of,
)
from tests.support.training import OVERLAP, Record, assert_same_run, pretrain
from tests.support.training_runs.small_steps import weights_of
from tests.support.wrapping import layer_config, wrap

pytestmark = pytest.mark.slow
STEPS = 3


@dataclass
class Seen:
    """What a rank saw of some steps."""

    outputs: list[torch.Tensor] = field(default_factory=list)
    in_flight: list[list[bool]] = field(default_factory=list)
    """Per step and chunk, whether gathers of all of its groups were in flight, or of none."""
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def _train(config: MoEOptimConfig | None, in_step: bool, optimizer: Any = "adam") -> Seen:
    """Train two chunks of experts and a dense layer; ``config`` None for stock Megatron."""
    from megatron.core import optimizer as core_optimizer
    from megatron.core.optimizer import OptimizerConfig

    initialize()
    if config is not None:
        installation.install(config, optimizer=optimizer)
    chunks = []
    for _ in range(2):
        layers = make_layers(config.format if config else "bf16")
        for index in QUANTIZED:
            layers[index].weight.allreduce = False  # as experts: with an optimizer of their own
        chunks.append(
            wrap(layer_config(WIDTH), layers, overlap_grad_reduce=True, overlap_param_gather=True)
        )
    settings = OptimizerConfig(
        optimizer=optimizer,
        lr=1e-2,
        bf16=True,
        use_distributed_optimizer=True,
        overlap_param_gather=True,
        overlap_param_gather_with_optimizer_step=in_step,
    )
    chain = core_optimizer.get_megatron_optimizer(settings, chunks)
    seen = Seen()
    for number in range(STEPS):
        chain.zero_grad()
        hidden = tokens_of(number, dist.get_rank())
        for chunk in chunks:
            chunk.zero_grad_buffer()
            hidden = run_layers(chunk.module, hidden)
        seen.outputs.append(hidden.detach().clone())
        hidden.float().square().sum().backward()
        for chunk in chunks:
            chunk.finish_grad_sync()
        chain.step()
        groups = [[*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups] for chunk in chunks]
        flights = [{group.param_gather_handle is not None for group in of} for of in groups]
        seen.in_flight.append([are_in_flight for (are_in_flight,) in flights])
    for number, chunk in enumerate(chunks):
        chunk.start_param_sync(force_sync=True)
        seen.weights |= {f"{number}.{name}": one for name, one in weights_of(chunk).items()}
    return seen


@pytest.mark.parametrize(
    ("config", "optimizer"),
    [
        pytest.param(MoEOptimConfig(format="mxfp8", step="fused"), "adam", id="fused"),
        pytest.param(
            MoEOptimConfig(format="nvfp4", wire="bf16", step="fused"), "adam", id="shared memory"
        ),
        pytest.param(MoEOptimConfig(format="mxfp8", step="stock"), "adam", id="stock step"),
        pytest.param(MoEOptimConfig(format="bf16", step="stock"), "adam", id="bf16, stock step"),
        pytest.param(MoEOptimConfig(format="mxfp8_2d", step="fused"), "muon", id="muon"),
    ],
)
def test_gathers_of_the_first_chunk_start_within_a_step_and_carry_what_it_wrote(
    config: MoEOptimConfig, optimizer: str
):
    """Those of its experts, too, whose optimizer is the last. Outputs and weights are those of a
    run that gathers in forward passes, to the bit."""
    ours = run_ranks(2, _train, config, True, optimizer)
    without = run_ranks(2, _train, config, False, optimizer)
    for one, other in zip(ours, without, strict=True):
        assert one.in_flight == [[True, False]] * STEPS
        assert other.in_flight == [[False, False]] * STEPS
        assert all(map(torch.equal, one.outputs, other.outputs))
        assert not torch.equal(one.outputs[0], one.outputs[-1])
        assert_same_tensors(one.weights, other.weights)


def _order_of_megatrons() -> list[str]:
    """Return what the experts of the first chunk go through in Megatron's step, in order."""
    order: list[str] = []
    gather = _ParamAndGradBucketGroup.start_param_sync
    step = DistributedOptimizer.step_with_ready_grads

    def gathered(self: Any, *args: Any, **kwargs: Any) -> None:
        if any(not param.allreduce for param in self.params if hasattr(param, "allreduce")):
            order.append("gather")
        gather(self, *args, **kwargs)

    def stepped(self: Any) -> bool:
        is_updated = step(self)
        order.append("experts" if len(self.model_chunks) == 2 else "dense")
        return is_updated

    with (
        mock.patch.object(_ParamAndGradBucketGroup, "start_param_sync", gathered),
        mock.patch.object(DistributedOptimizer, "step_with_ready_grads", stepped),
    ):
        _train(None, in_step=True)
    return order


def test_megatron_gathers_the_first_chunks_experts_before_they_have_stepped():
    """A fault of its own: other ranks' experts are those of the step before, or torn."""
    for order in run_ranks(2, _order_of_megatrons):
        first_step = order[order.index("dense") :]
        assert first_step[:4] == ["dense", "gather", "dense", "experts"]


def _pretrain(flags: list[str]) -> Record:
    return pretrain(flags, MoEOptimConfig(format="mxfp8", step="fused"))


@pytest.mark.extended
def test_a_pipeline_trains_and_resumes_with_it_as_without(tmp_path: Path):
    """Two stages of two chunks, with evaluations between steps, in the one format of checkpoints
    that Megatron's arguments allow with the flag; to the bit."""
    flags = [*OVERLAP, "--overlap-param-gather-with-optimizer-step", "--ckpt-format", "torch"]
    flags += shlex.split("--pipeline-model-parallel-size 2 --num-layers 4 --global-batch-size 8")
    flags += shlex.split("--num-virtual-stages-per-pipeline-rank 2 --clip-grad 1.0")
    flags += shlex.split("--eval-interval 2 --save-interval 100 --lr-decay-iters 8")
    flags += ["--override-opt_param-scheduler"]
    folder = str(tmp_path)
    plain = [flag for flag in flags if "with-optimizer-step" not in flag]
    without = run_ranks(4, _pretrain, [*plain, "--train-iters", "4"])
    straight = run_ranks(4, _pretrain, [*flags, "--train-iters", "4"])
    run_ranks(4, _pretrain, [*flags, "--train-iters", "2", "--save", folder])
    resumed = run_ranks(4, _pretrain, [*flags, "--train-iters", "4", "--load", folder])
    for rank in range(4):
        assert_same_run(straight[rank], without[rank], what=f"rank {rank}")
        assert resumed[rank].losses == {n: without[rank].losses[n] for n in resumed[rank].losses}
        assert_same_tensors(resumed[rank].masters, without[rank].masters)
        assert_same_tensors(resumed[rank].weights, without[rank].weights)
    assert len(resumed[-1].losses) == 2
