"""A step on a GPU is Transformer Engine's FusedAdam and then a requantization, to the bit."""

from dataclasses import replace

import pytest
import torch

from moe_optim.formats import FORMATS
from moe_optim.formats.reference.adam import step_into
from moe_optim.kernels.adam_state import AdamState
from moe_optim.kernels.step_table import StepTable
from moe_optim.weights.te.recipe import import_error
from tests.support.bytes import assert_values_equal
from tests.support.inputs import wide_range_weights, with_specials
from tests.support.steps.adam_cases import HYPER, as_tensors, cases
from tests.support.steps.launches import assert_neither_allocates_nor_waits
from tests.support.steps.stepping import (
    HYPERS,
    STATES,
    Stepping,
    Weight,
    gradients_of,
)

pytestmark = pytest.mark.gpu
NEEDS_TE = pytest.mark.skipif(import_error() is not None, reason="needs Transformer Engine")
EVERY_FORMAT = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS.keys())
DECAYS = pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "L2"])
CLIPS = (1.0, 0.37)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
KINDS = [  # dtypes of gradients and moments, and the decay
    pytest.param(
        gradients,
        moments,
        decay == "AdamW",
        id=f"{first} gradients, {second} moments, {decay}",
        marks=() if (decay == "AdamW") == (first == "fp32") else pytest.mark.extended,
    )
    for first, gradients in DTYPES.items()
    for second, moments in DTYPES.items()
    for decay in ("AdamW", "L2")
]
NUMEL = 2 * 256 * 384
INSIDE_A_BLOCK = (NUMEL // 3 // 8 * 8 + 320,)
INSIDE_A_PACK = (NUMEL // 3 // 8 * 8 + 2,)  # and at no multiple of 16 bytes
AT_THE_END = (NUMEL,)
"""The second of two ranks owns nothing."""


def weights_of(format):
    """Return weights with special values in two shards: quantized and dense, under both clips."""
    places = (AT_THE_END, INSIDE_A_BLOCK, INSIDE_A_PACK)
    kinds = [(format, torch.bfloat16), (None, torch.bfloat16), (None, torch.float32)]
    return [
        Weight(
            master=with_specials(wide_range_weights(2, 256, 384, seed=number)),
            format=one,
            dtype=dtype,
            bounds=bounds,
            group=number % 2,
            norm=number // 2 % 2,
        )
        for number, (bounds, (one, dtype)) in enumerate(
            (bounds, kind) for bounds in places for kind in kinds
        )
    ]


def set_number(run, number):
    """Let the next step be the one of this number."""
    rows = [replace(hyper, step=number).row() for hyper in HYPERS]
    run.hyper.copy_(torch.tensor(rows))


def assert_in_kernels(run):
    """Fail unless launches handle everything that a rank owns something of."""
    for table in run.tables:
        assert not table.remainder
        assert not any(entry.source.numel() for entry, _ in table.members.remainder)


class Theirs:
    """The same weights, stepped by Transformer Engine."""

    def __init__(self, weights, moments, decoupled):
        from transformer_engine.pytorch.optimizers import FusedAdam

        self.weights = weights
        self.parameters = [torch.nn.Parameter(one.master.flatten().cuda()) for one in weights]
        groups = [
            {
                "params": [
                    parameter
                    for parameter, one in zip(self.parameters, weights, strict=True)
                    if one.group == number
                ],
                "lr": hyper.lr,
                "betas": hyper.betas,
                "eps": hyper.eps,
                "weight_decay": hyper.weight_decay,
            }
            for number, hyper in enumerate(HYPERS)
        ]
        self.optimizer = FusedAdam(
            groups, adam_w_mode=decoupled, exp_avg_dtype=moments, exp_avg_sq_dtype=moments
        )

    def step(self, gradients, dtype):
        for parameter, one, gradient in zip(self.parameters, self.weights, gradients, strict=True):
            rounded = gradient.flatten().cuda().to(dtype).float()
            parameter.grad = rounded * CLIPS[one.norm]
        self.optimizer.step()

    def states(self, index):
        parameter = self.parameters[index]
        state = self.optimizer.state[parameter]
        return parameter.detach(), state["exp_avg"], state["exp_avg_sq"]


@NEEDS_TE
@EVERY_FORMAT
@pytest.mark.parametrize(("gradients", "moments", "decoupled"), KINDS)
def test_steps_are_transformer_engines(format, gradients, moments, decoupled):
    """Masters, moments and weights after each of three steps, with cuts and without."""
    weights = weights_of(format)
    run = Stepping(
        weights,
        gradients=gradients,
        moments=moments,
        decoupled=decoupled,
        clips=CLIPS,
        device="cuda",
    )
    assert_in_kernels(run)
    theirs = Theirs(weights, moments, decoupled)
    for number in (1, 2, 3):
        set_number(run, number)
        given = gradients_of(weights, 100 * number)
        run.give(given)
        run.update()
        theirs.step(given, gradients)
        for index in range(len(weights)):
            for got, want, name in zip(
                run.states(index), theirs.states(index), STATES, strict=True
            ):
                assert_values_equal(got, want, what=f"step {number}, fc{index} {name}")
        run.assert_weights_follow()


@NEEDS_TE
@DECAYS
@pytest.mark.parametrize("moments", DTYPES.values(), ids=DTYPES)
def test_a_thousand_steps_are_transformer_engines(moments, decoupled):
    """Masters and moments after each of the steps 1 to 1,000, at sizes of gradients far apart, in
    every format and in bf16; and what is made of the masters after some of them."""
    weights = [
        Weight(
            master=wide_range_weights(2, 128, 128, seed=number),
            format=format,
            dtype=torch.bfloat16,
            group=number % 2,
        )
        for number, format in enumerate([*FORMATS.values(), None])
    ]
    all_gradients = wide_range_weights(1000, len(weights), 2 * 128 * 128).cuda()
    run = Stepping(weights, moments=moments, decoupled=decoupled, clips=CLIPS[:1], device="cuda")
    theirs = Theirs(weights, moments, decoupled)
    differ = torch.zeros(1000, dtype=torch.bool, device="cuda")
    for number in range(1, 1001):
        set_number(run, number)
        given = all_gradients[number - 1].unbind()
        run.give(given)
        run.update()
        theirs.step(given, torch.float32)
        for index in range(len(weights)):
            for got, want in zip(run.states(index), theirs.states(index), strict=True):
                differ[number - 1] |= (got.view(torch.uint8) != want.view(torch.uint8)).any()
        if number in (1, 2, 10, 100):
            run.assert_weights_follow()
    assert not differ.any(), f"first at step {int(differ.nonzero()[0]) + 1}"
    run.assert_weights_follow()


# Against the definition


def stepped(states, gradient, row, decoupled, moments):
    """Return states [3, n] after a step of kernels, and of the reference, on the GPU."""
    master, exp_avg, exp_avg_sq = (
        one.to(dtype).cuda()
        for one, dtype in zip(states, (torch.float32, moments, moments), strict=True)
    )
    gradient, hyper, clips = gradient.cuda(), torch.tensor([row]).cuda(), torch.ones(1).cuda()
    want = [one.clone() for one in (master, exp_avg, exp_avg_sq)]
    step_into(*(want[0], gradient, *want[1:]), hyper=hyper[0], clip=clips[0], decoupled=decoupled)
    state = AdamState(
        parameter="x", master=master, gradient=gradient, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq
    )
    table = StepTable.build([state], hyper, clips, decoupled=decoupled)
    assert table.update.kernels
    assert not table.remainder
    table.launch()
    return [master, exp_avg, exp_avg_sq], want


def assert_near(got, want, largest, units):
    """Fail unless masters are so many units of the largest apart; without NaN and infinities."""
    unit = torch.exp2(torch.frexp(largest.double()).exponent - 24.0)
    assert ((got.double() - want.double()).abs() <= units * unit).all()


@DECAYS
def test_the_table_of_special_values(decoupled):
    table = cases(decoupled=decoupled)
    states, gradients, wanted = as_tensors(table)
    got, _ = stepped(states, gradients, HYPER.row(), decoupled, torch.float32)
    for index, name in enumerate(table):
        for one, want, what in zip(got, wanted, STATES, strict=True):
            value, expected = one[index].cpu(), want[index]
            if what == "master" and expected.isfinite() and expected != 0:
                assert_near(value, expected, expected.abs(), 2)
            else:
                assert_values_equal(value, expected, what=f"{name}: {what}")


# Launches


@EVERY_FORMAT
def test_a_step_allocates_nothing_and_does_not_wait(format):
    """Of what is cut and of what is not, quantized and dense."""
    run = Stepping(weights_of(format), clips=CLIPS, device="cuda")
    table = run.tables[0]

    def step():
        table.launch()
        table.members.encode_shared.launch()
        table.members.finish.launch()

    assert_neither_allocates_nor_waits(step)


def assert_a_graph_takes_the_steps(weights, **options):
    """Gradients, hyper-parameters and clip factors are read anew by every replay."""
    eager, captured = (Stepping(weights, device="cuda", **options) for _ in range(2))
    for run in (eager, captured):
        run.give(gradients_of(weights, 0))
        run.update()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.update()
    for number in (2, 3):
        for run, update in ((eager, eager.update), (captured, graph.replay)):
            set_number(run, number)
            run.clips.fill_(1 / number)
            run.give(gradients_of(weights, 100 * number))
            update()
        for index in range(len(weights)):
            for got, want, name in zip(
                captured.states(index), eager.states(index), STATES, strict=True
            ):
                assert_values_equal(got, want, what=f"step {number}, fc{index} {name}")
        captured.assert_weights_follow()


@EVERY_FORMAT
def test_a_captured_graph_takes_further_steps(format):
    assert_a_graph_takes_the_steps(weights_of(format), clips=CLIPS)
