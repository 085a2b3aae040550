"""Delayed weight gradients of the portable experts, under Megatron's DDP and its own schedule."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_optim.config import MoEOptimConfig
from moe_optim.errors import StateError
from tests.support.modules.experts import make_config, start_ranks
from tests.support.ranks import on_ranks, run_ranks
from tests.support.states.schedules import turn_on
from tests.support.training import (
    OVERLAP,
    Record,
    assert_same_run,
    assert_same_tensors,
    named_parameters,
    pretrain,
)
from tests.support.wrapping import wrap

LAYERS, STEPS, MICRO_BATCHES = 2, 2, 2
KNOBS = {
    f"{format} {layout} {'fused' if fuse else 'unfused'}": {
        "format": format,
        "expert_layout": layout,
        "fuse_wgrad_accumulation": fuse,
    }
    for format, layout, fuse in (
        ("bf16", "grouped", True),
        ("bf16", "indexed", False),
        ("mxfp8", "grouped", False),
        ("mxfp8", "indexed", True),
    )
}
Tensors = dict[str, Tensor]


@dataclass
class Reduced:
    """What two steps of two micro-batches left on a rank."""

    gradients: list[Tensors]  # of a step, after its reduction
    in_flight: list[list[int]]
    """Reductions of expert weights that were on their way after each call of the last backward
    pass of a step: the backward pass itself, then ``backward_dw`` of the last and the first layer.
    """


def _make_ddp(*, delay: bool) -> Any:
    """Return two MoE layers with biases under DDP, every weight a bucket of its own."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_block import TransformerBlock

    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    config = make_config(
        num_layers=LAYERS,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        add_bias_linear=True,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    config.delay_wgrad_compute = delay  # given to the constructor, it asks for expert parallelism
    spec = get_gpt_layer_local_spec(4, moe_grouped_gemm=True)
    block = TransformerBlock(config, spec, post_layer_norm=False)
    return wrap(config, block, overlap_grad_reduce=True, bucket_size=1, delay_wgrad_compute=delay)


def _reductions(ddp: Any) -> int:
    """Return how many expert weights have a reduction on its way."""
    return sum(
        ddp.param_to_bucket_group[parameter].grad_reduce_handle is not None
        for name, parameter in ddp.module.named_parameters()
        if ".experts." in name and ".weight" in name
    )


def _run_micro_batch(ddp: Any, seed: int, *, delay: bool) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(8, 2, 64, generator=generator).bfloat16().requires_grad_()
    mask = torch.ones(8, 8, dtype=torch.bool).triu(1)[None, None]
    output = ddp(tokens, mask)
    output.backward(torch.randn(output.shape, generator=generator).bfloat16())
    in_flight = [_reductions(ddp)]
    for layer in reversed(ddp.module.layers) if delay else ():
        layer.mlp.backward_dw(routed_experts=True)
        in_flight.append(_reductions(ddp))
    return in_flight


def _run_steps(*, delay: bool) -> Reduced:
    ddp = _make_ddp(delay=delay)
    found = Reduced([], [])
    for step in range(STEPS):
        ddp.zero_grad_buffer()
        seed = 100 * torch.distributed.get_rank() + 10 * step
        with ddp.no_sync():
            for micro_batch in range(MICRO_BATCHES - 1):
                _run_micro_batch(ddp, seed + micro_batch, delay=delay)
        found.in_flight.append(_run_micro_batch(ddp, seed + MICRO_BATCHES, delay=delay))
        ddp.finish_grad_sync()
        gradients = {n: p.main_grad.clone() for n, p in named_parameters([ddp])}
        found.gradients.append(gradients)
    return found


def _run_all() -> dict[tuple[str, bool], Reduced]:
    from moe_optim.integration import installation

    start_ranks()
    found = {}
    for name, knobs in KNOBS.items():
        installation.install(MoEOptimConfig(**knobs))
        for delay in (True, False):
            found[name, delay] = _run_steps(delay=delay)
        installation.uninstall()
    return found


@pytest.fixture(scope="module")
def reduced() -> list[dict[tuple[str, bool], Reduced]]:
    """Return what both ranks found, by knobs and by whether gradients were delayed."""
    return run_ranks(2, _run_all)


@pytest.mark.parametrize("knobs", KNOBS)
def test_reduced_gradients_are_those_without_delay(reduced, knobs: str):
    """Of every parameter, biases, routers and attention too, on both ranks, to the bit."""
    for rank in reduced:
        delayed, direct = rank[knobs, True], rank[knobs, False]
        assert len(delayed.gradients) == STEPS
        for got, want in zip(delayed.gradients, direct.gradients, strict=True):
            assert_same_tensors(got, want, what=knobs)
            experts = [grad for name, grad in want.items() if ".experts." in name]
            assert experts and all(grad.any() for grad in experts)


@pytest.mark.parametrize("knobs", KNOBS)
def test_a_bucket_is_reduced_when_its_delayed_gradient_is_there(reduced, knobs: str):
    """Not in the backward pass, and a layer at a time: its two linears, or two of each expert. In
    the first step Megatron only counts, and reduces at the end."""
    weights = LAYERS * 2 * (4 if "indexed" in knobs else 1)
    for rank in reduced:
        first, second = rank[knobs, True].in_flight
        assert first == [0, 0, 0]
        assert second == [0, weights // 2, weights]
        assert rank[knobs, False].in_flight == [[0], [weights]]


# In a training run

RUN = ["--train-iters", "3", "--eval-interval", "3", *OVERLAP, "--clip-grad", "1.0"]
RUN += ["--expert-model-parallel-size", "2"]
OVERLAPPED = ["--overlap-moe-expert-parallel-comm"]
TRAINED = {
    "mxfp8": MoEOptimConfig(format="mxfp8"),
    "indexed, unfused": MoEOptimConfig(
        format="bf16", expert_layout="indexed", fuse_wgrad_accumulation=False
    ),
}


def _train(flags: list[str], config: MoEOptimConfig, switch: str | None = None) -> Record:
    """Train; ``extra`` counts delayed gradients.

    Args:
        flags: added to those of the model.
        config: of the plug-in.
        switch: the setting that delays gradients, if any.
    """
    from moe_optim.integration import cpu_runtime

    cpu_runtime.install()
    from moe_optim.experts.grouped_linear import GroupedLinear

    keep, kept = GroupedLinear.keep_for_wgrad, []

    def count(self: GroupedLinear, factors: Any) -> None:
        kept.append(self.name)
        keep(self, factors)

    if switch is not None:
        turn_on(switch)
    GroupedLinear.keep_for_wgrad = count
    return pretrain(flags, config, observe=lambda *_: len(kept))


@pytest.fixture(scope="module")
def train_plainly() -> Callable[[str], list[Record]]:
    """Return a function that trains with Megatron's plain schedule, once, by knobs."""
    return cache(lambda knobs: run_ranks(2, _train, RUN, TRAINED[knobs]))


@pytest.mark.extended
@pytest.mark.parametrize("knobs", TRAINED)
@pytest.mark.parametrize(
    ("flags", "switch"),
    [
        (OVERLAPPED, None),
        (OVERLAPPED, "delay_wgrad_compute"),
        ([], "overlap_dispatch_backward_with_experts_wgrad"),
    ],
    ids=["overlapped", "delayed", "while tokens are sent back"],
)
def test_schedules_that_compute_gradients_later_train_alike(
    train_plainly, flags, switch, knobs: str
):
    """Two expert-parallel ranks end with the losses, masters, moments and weights of Megatron's
    plain schedule: where passes of one micro-batch run between those of another, also with the
    gradients of experts delayed among them; and where the dispatcher asks for these in the middle
    of a backward pass."""
    switched = run_ranks(2, _train, [*RUN, *flags], TRAINED[knobs], switch)
    for got, want in zip(switched, train_plainly(knobs), strict=True):
        assert len(want.losses) == 3
        passes = 3 * 2 * LAYERS * 2  # steps x micro-batches x layers x linears
        assert (got.extra, want.extra) == (passes if switch else 0, 0)
        assert_same_run(got, want, what=str(switch))


@pytest.mark.parametrize("experts", ["mxfp8", pytest.param("bf16", marks=pytest.mark.extended)])
@on_ranks(1)
def test_training_without_its_delayed_gradients_is_stopped(experts):
    """Before its first step: they would be lost in it. ``zero_grad()`` drops them."""
    config = replace(TRAINED["mxfp8"], format=experts)
    from moe_optim.integration import cpu_runtime

    cpu_runtime.install()
    from moe_optim.experts.grouped_linear import GroupedLinear
    from moe_optim.experts.module import GroupedExperts

    GroupedExperts.backward_dw = lambda _self: None
    turn_on("overlap_dispatch_backward_with_experts_wgrad")
    built: list[Any] = []
    steps: list[int] = []
    with pytest.raises(StateError) as error:
        pretrain(
            ["--train-iters", "3", "--eval-interval", "3"],
            config,
            after_setup=lambda *both: built.extend(both),
            after_step=lambda step, *_: steps.append(step),
        )
    assert not steps
    model, optimizer = built
    optimizer.zero_grad()
    linears = [one for one in model[0].modules() if isinstance(one, GroupedLinear)]
    for linear in linears:
        linear.require_wgrads_taken()
    message, linears = str(error.value), len(linears)
    assert "experts.linear_fc1.weight: expected the gradients of all backward passes" in message
    assert "got 4 still delayed" in message
    assert linears == 2 * LAYERS
