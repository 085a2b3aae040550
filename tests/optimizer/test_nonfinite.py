"""A non-finite gradient stops or skips the step before anything has moved, and is named."""

import logging
import re
from typing import Any

import pytest
import torch

from moe_optim.config import MoEOptimConfig
from moe_optim.errors import NonFiniteError
from tests.support.ranks import on_ranks, run_ranks
from tests.support.states import life_cycle
from tests.support.training import OVERLAP, assert_same_tensors, pretrain, weight_bytes

FLAGS = ["--train-iters", "4", "--eval-interval", "1000000", "--no-check-for-nan-in-loss-and-grad"]
POISONED_STEP = 3
NAME = "decoder.layers.1.mlp.experts.linear_fc1.weight"


def _snapshot(model: list[Any], optimizer: Any) -> dict[str, torch.Tensor]:
    """Copy masters, moments and weights of this rank."""
    model[0].start_param_sync(force_sync=True)
    state: dict[str, torch.Tensor] = {}
    for name, param in model[0].module.named_parameters():
        state |= weight_bytes(name, param)
    for part in optimizer.chained_optimizers:
        for index, (master, moments) in enumerate(part.optimizer.state.items()):
            state[f"master {index}"] = master.clone()
            state |= {f"{key} {index}": moment.clone() for key, moment in moments.items()}
    return state


def _train(value: float, policy: str, expert_layout: str) -> dict[str, Any]:
    """Poison one gradient of expert 2 on the rank that owns it, in step 3."""
    seen: dict[str, Any] = {"snapshots": {}}
    steps = iter(range(1, 100))

    def poison(model: list[Any], optimizer: Any) -> None:
        (part,) = optimizer.chained_optimizers
        stock = part._copy_model_grads_to_main_grads

        def poisoned() -> None:
            step = next(steps)
            for name, param in model[0].module.named_parameters():
                indexed = name.endswith("layers.1.mlp.experts.linear_fc1.weight2")
                grouped = name.endswith("layers.1.mlp.experts.linear_fc1.weight")
                if step == POISONED_STEP and (indexed or grouped):
                    (param.main_grad[2] if grouped else param.main_grad)[5, 7] = value
            stock()

        part._copy_model_grads_to_main_grads = poisoned

    def keep(step: int, model: list[Any], optimizer: Any) -> None:
        if step >= POISONED_STEP - 1:
            seen["snapshots"][step] = _snapshot(model, optimizer)

    config = MoEOptimConfig(format="mxfp8", nonfinite=policy, expert_layout=expert_layout)
    try:
        record = pretrain([*FLAGS, *OVERLAP], config, after_setup=poison, after_step=keep)
        seen["losses"] = record.losses
    except NonFiniteError as error:
        seen["error"] = str(error)
    return seen


def test_skip_leaves_masters_moments_and_weights_alone():
    """The poisoned step changes no byte on any rank, and the next one trains."""
    for seen in run_ranks(2, _train, float("-inf"), "skip", "grouped"):
        before, after, later = (seen["snapshots"][step] for step in (2, 3, 4))
        assert_same_tensors(after, before, what="step 3")
        assert any(not torch.equal(later[name], after[name]) for name in later)
        assert all(buffer.float().isfinite().all() for buffer in later.values())


@pytest.mark.parametrize(
    "expert_layout", ["grouped", pytest.param("indexed", marks=pytest.mark.extended)]
)
def test_raise_names_parameter_layer_expert_and_owner_on_every_rank(expert_layout: str):
    """Every rank stops with one message that says where to look, before the step."""
    for seen in run_ranks(2, _train, float("nan"), "raise", expert_layout):
        parameter = NAME if expert_layout == "grouped" else f"{NAME}2"
        assert f"{parameter}, expert 2: 1 non-finite gradient" in seen["error"]
        assert seen["error"].count("rank ") == 1  # one rank owns that element
        assert "No weight has moved" in seen["error"]
        assert set(seen["snapshots"]) == {2}


def _train_on_nan_of_the_last_stage() -> str:
    """Return what is said of a gradient of the only layer that the second of two stages has."""

    def poison(model: list[Any], optimizer: Any) -> None:
        stock = optimizer.prepare_grads

        def prepare_grads() -> bool:
            if torch.distributed.get_rank() == 1:
                named = dict(model[0].module.named_parameters())
                named[f"module.{NAME.replace('layers.1', 'layers.0')}"].main_grad.fill_(torch.nan)
            return stock()

        optimizer.prepare_grads = prepare_grads

    flags = [*FLAGS, "--pipeline-model-parallel-size", "2"]
    with pytest.raises(NonFiniteError) as error:
        pretrain(flags, MoEOptimConfig(format="mxfp8"), after_setup=poison)
    return str(error.value)


def test_layers_are_counted_over_all_pipeline_stages():
    """As experts are over all ranks: the layer is that of the model, not of the stage."""
    for said in run_ranks(2, _train_on_nan_of_the_last_stage):
        assert f"rank 1: {NAME}, expert 0, 1, 2, 3: " in said
        assert "layers.0" not in said


DETACHED_HEADS = ["--mtp-num-layers", "1", "--mtp-detach-heads"]
WAYS = {  # flags that give a NaN another way through Megatron's step, and the parameter that has it
    "a norm of its own": (DETACHED_HEADS, "mtp.layers.0.eh_proj.weight"),
    "a norm of its own, clipped": ([*DETACHED_HEADS, "--clip-grad", "1.0"], "mtp.layers.0.eh_proj"),
    "a constant loss scale": (["--loss-scale", "8"], "decoder.layers.0.self_attention"),
}


def _train_on_nan(flags: list[str], culprit: str, policy: str) -> tuple[str, bool]:
    """Return what was said, and whether masters and moments were as before the poisoned step."""
    states: list[dict[str, torch.Tensor]] = []
    steps = iter(range(1, 100))

    def poison(model: list[Any], optimizer: Any) -> None:
        stock = optimizer.prepare_grads
        params = [p for n, p in model[0].module.named_parameters() if culprit in n]

        def prepare_grads() -> bool:
            if next(steps) == 2:
                states.append(_snapshot(model, optimizer))
                for param in params:
                    param.main_grad.fill_(torch.nan)
            return stock()

        optimizer.prepare_grads = prepare_grads

    def keep(step: int, model: list[Any], optimizer: Any) -> None:
        if step == 2:
            states.append(_snapshot(model, optimizer))

    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("moe_optim.optimizer.chained").addHandler(handler)
    config = MoEOptimConfig(format="mxfp8", nonfinite=policy)
    try:
        flags = ["--train-iters", "3", *FLAGS[2:], *flags]
        pretrain(flags, config, after_setup=poison, after_step=keep)
    except NonFiniteError as error:
        return str(error), len(states) == 1
    before, after = states
    assert_same_tensors(after, before, what="a skipped step")
    return " ".join(warnings), True


@pytest.mark.parametrize(
    ("way", "policy"),
    [
        pytest.param("a norm of its own", "raise", marks=pytest.mark.extended),
        ("a norm of its own, clipped", "skip"),
        ("a constant loss scale", "raise"),
        pytest.param("a constant loss scale", "skip", marks=pytest.mark.extended),
    ],
)
def test_no_way_through_a_step_misses_a_nan(way: str, policy: str):
    """Whichever norm Megatron keeps it in, or whatever looks for it first: both policies hold, and
    the culprit is named."""
    flags, culprit = WAYS[way]
    ((said, unmoved),) = run_ranks(1, _train_on_nan, flags, culprit, policy)
    assert unmoved
    assert culprit in said
    assert ("optimizer step skipped" in said) == (policy == "skip")


def _load_nonfinite_master(flags: list[str]) -> str:
    answers: list[str] = []

    def poison(model: list[Any], optimizer: Any) -> None:
        model[0].start_param_sync(force_sync=True)
        part = optimizer.chained_optimizers[0]
        named = dict(model[0].module.named_parameters())
        before = {k: v for n, p in named.items() for k, v in weight_bytes(n, p).items()}
        if torch.distributed.get_rank() == 1:
            buffers = [buffer for buffer in part.buffers if buffer.managed]
            managed = [bucket.managed for buffer in buffers for bucket in buffer.buckets]
            last = [one for bucket in managed for one in part.masters_of(bucket)][-1]
            last.master[-1] = float("nan")
        with pytest.raises(NonFiniteError) as error:
            part.refresh_weights()  # what loading a checkpoint ends with
        answers.append(str(error.value))
        after = {k: v for n, p in named.items() for k, v in weight_bytes(n, p).items()}
        assert_same_tensors(after, before, what="weights")

    pretrain(flags, MoEOptimConfig(format="mxfp8"), observe=poison)
    return answers[0]


def test_a_nonfinite_master_is_not_gathered_when_a_checkpoint_is_loaded():
    """All ranks of the group raise and name it, and every byte of the weights is as before."""
    flags = ["--train-iters", "1", "--eval-interval", "1000000", *OVERLAP]
    for message in run_ranks(2, _load_nonfinite_master, flags):
        assert re.search(
            r"got data-parallel rank 1: decoder\.layers\.\d\.mlp\.experts\.linear_fc\d\.weight, "
            r"expert \d: 1 non-finite master\. No weight has been gathered",
            message,
        )


@on_ranks(1)
def test_an_optimizer_without_parameters_hides_no_culprit():
    """As that of frozen weights, or of experts on a stage that has none."""
    life_cycle.initialize()
    from moe_optim.optimizer.chained import GroupedChainedOptimizer
    from moe_optim.optimizer.distributed import GroupedDistributedOptimizer

    cycle = life_cycle.LifeCycle()
    part = cycle.optimizer.chained_optimizers[0]
    stub = GroupedDistributedOptimizer(
        *(None, part.config, None, lambda: None),
        model_chunks=[cycle.ddp],
        per_model_buffers={},
        data_parallel_group=part.data_parallel_group,
        data_parallel_group_gloo=part.data_parallel_group_gloo,
        data_parallel_group_idx=0,
        distributed_optimizer_instance_id=0,
    )
    chain = GroupedChainedOptimizer([stub, part])
    cycle.zero()
    cycle.micro(0, last=True)
    numel = life_cycle.EXPERTS * life_cycle.WIDTH**2
    of_experts = next(one for one in part.model_float16_groups[0] if one.numel() == numel)
    of_experts.main_grad.fill_(torch.nan)
    said = rf"rank 0: first\.linear_fc2\.weight: {numel} non-finite"
    with pytest.raises(NonFiniteError, match=said):
        chain.step()
