"""Training bf16 weights in narrow products is training stored narrow weights, to the bit."""

import pytest
import torch

from moe_optim.config import MoEOptimConfig
from moe_optim.experts.grouped_linear import GroupedLinear
from moe_optim.formats import MXFP8, Direction, get_format
from moe_optim.formats.reference import dequantize, quantize
from moe_optim.kernels.member_table import MemberTable
from tests.support.bytes import assert_bytes_equal, assert_same_tensors
from tests.support.ranks import on_ranks, run_ranks
from tests.support.states import life_cycle
from tests.support.training import OVERLAP, Record, pretrain

STEPS = ["--train-iters", "4", "--eval-interval", "2"]  # evaluates in the middle and at the end
LINEARS = 2 * 2  # layers, linears of one
CASES = {  # compute, layout, flags
    "mxfp8": ("mxfp8", "grouped", []),
    "nvfp4, overlapped": ("nvfp4", "indexed", OVERLAP),
}


class QuantizedOnTheFly(GroupedLinear):
    """bf16 weights that every product quantizes and dequantizes first: the oracle of storage."""

    def operand(self, direction: Direction) -> torch.Tensor:
        values = super().operand(direction)
        return dequantize(quantize(values, MXFP8), direction).bfloat16()


def _train(flags: list[str], config: MoEOptimConfig) -> Record:
    """Train; ``extra`` holds how many requantizations there had been after every step."""
    launch, calls, after_steps = MemberTable.launch, [], []

    def counting(table: MemberTable) -> None:
        calls.append(table)
        launch(table)

    MemberTable.launch = counting
    return pretrain(
        flags,
        config,
        after_step=lambda *_: after_steps.append(len(calls)),
        observe=lambda *_: after_steps,
    )


@pytest.fixture(
    scope="module", params=["mxfp8", pytest.param("nvfp4, overlapped", marks=pytest.mark.extended)]
)
def runs(request) -> tuple[str, list[Record], list[Record]]:
    """Return the format, and 2 ranks of both ways to train in it."""
    format, layout, overlap = CASES[request.param]
    computing = MoEOptimConfig(format="bf16", compute=format, expert_layout=layout)
    storing = MoEOptimConfig(format=format, expert_layout=layout)
    flags = [*STEPS, *overlap]
    return format, run_ranks(2, _train, flags, computing), run_ranks(2, pretrain, flags, storing)


def test_losses_are_those_of_stored_weights(runs):
    _, computing, storing = runs
    for mine, theirs in zip(computing, storing, strict=True):
        assert len(mine.losses) == 4
        assert len(mine.validation_losses) >= 2
        assert mine.losses == theirs.losses
        assert mine.validation_losses == theirs.validation_losses


def test_weights_quantize_to_what_is_stored(runs):
    format, computing, storing = runs
    for mine, theirs in zip(computing, storing, strict=True):
        names = [name for name in mine.weights if ".mlp.experts." in name]
        assert len(names) >= LINEARS
        for name in names:
            weight = mine.weights[name]
            weight = weight.view(-1, *weight.shape[-2:])
            for buffer, expected in quantize(weight, get_format(format)).buffers().items():
                got = theirs.weights[f"{name}.{buffer}"]
                assert_bytes_equal(got, expected, what=f"{name}.{buffer}")


def _train_on_the_fly() -> Record:
    from moe_optim.experts import module as experts

    experts.GroupedLinear = QuantizedOnTheFly
    return pretrain(STEPS, MoEOptimConfig(format="bf16"))


def test_training_with_stored_experts_equals_quantizing_bf16_experts_on_the_fly(runs):
    """Through Megatron's loop on 2 ranks, gathers and optimizer included: losses, masters and
    moments to the bit. No stale or half-written buffer survives this."""
    format, _, stored = runs
    if format != "mxfp8":
        pytest.skip("the oracle is MXFP8's")
    for mine, theirs in zip(stored, run_ranks(2, _train_on_the_fly), strict=True):
        assert mine.losses == theirs.losses
        assert_same_tensors(mine.masters, theirs.masters, what="master")
        for name, moments in theirs.moments.items():
            assert_same_tensors(mine.moments[name], moments, what=name)
        assert mine.weights.keys() != theirs.weights.keys()  # one of them is quantized


@on_ranks(2)
def test_a_copy_made_before_a_gather_does_not_outlive_it():
    """On two ranks a forward pass between a step and its gather sees weights half of which are
    old; the next one sees what has arrived."""
    life_cycle.initialize()
    cycle = life_cycle.LifeCycle(format="bf16", compute="mxfp8")
    for seed in (0, 1):
        cycle.zero()
        cycle.micro(seed, last=True)
        cycle.optimizer.step()
        cycle.ddp.disable_forward_pre_hook(param_sync=False)
        cycle.ddp(life_cycle.tokens_of(9, 0))
        cycle.ddp.enable_forward_pre_hook()
    outputs = [cycle.ddp(life_cycle.tokens_of(9, 0)), cycle.ddp.module(life_cycle.tokens_of(9, 0))]
    fresh = life_cycle.make_layers("bf16", "mxfp8")
    with torch.no_grad():
        for layer, param in zip(fresh, cycle.params, strict=True):
            layer.weight.copy_(param)
    wanted = life_cycle.run_layers(fresh, life_cycle.tokens_of(9, 0))
    assert [torch.equal(output, wanted) for output in outputs] == [True, True]
