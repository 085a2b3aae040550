"""A delayed weight gradient is the one of the backward pass, with all its hooks, but later."""

from itertools import product

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from moe_optim.errors import StateError
from moe_optim.formats import MXFP8, NVFP4
from tests.support.bytes import assert_bytes_equal
from tests.support.modules import compiling
from tests.support.states.buckets import bind

SHAPE = (3, 64, 32)
COUNTS = ((5, 8, 3), (0, 9, 7), (0, 0, 0))  # tokens of each expert, by micro-batch
every_layout = pytest.mark.parametrize("layout", ["grouped", "indexed"])
every_format = pytest.mark.parametrize(
    "format", [None, MXFP8, NVFP4], ids=["bf16", "mxfp8", "nvfp4"]
)


def make_linear(format=MXFP8, layout="grouped", *, delay=True, fuse=True, main_grads=True):
    """Return a linear whose weights count the gradients they get, as DDP's hooks do."""
    linear = compiling.make_linear(format, layout, fuse=fuse, delay_wgrad=delay)
    for weight in linear.weights():
        weight.gradients = 0
        if main_grads:
            weight.main_grad = torch.full(weight.shape, 0.5)
        weight.accumulator = weight.expand_as(weight).grad_fn.next_functions[0][0]
        weight.accumulator.register_hook(lambda *_, weight=weight: take_gradient(weight))
    return linear


def take_gradient(weight):
    """Count a gradient, and add it where DDP's hook would."""
    weight.gradients += 1
    assert weight.grad is not None
    if hasattr(weight, "main_grad"):
        if not getattr(weight, "grad_added_to_main_grad", False):
            weight.main_grad.add_(weight.grad)
        weight.grad = None


def gradients_of(linear):
    return [weight.main_grad if weight.grad is None else weight.grad for weight in linear.weights()]


def run_forward(linear, micro_batch, *, token_grads=True):
    """Return tokens and output of a micro-batch."""
    counts = torch.tensor(COUNTS[micro_batch])
    generator = torch.Generator().manual_seed(micro_batch)
    tokens = torch.randn(int(counts.sum()), SHAPE[2], generator=generator).bfloat16()
    tokens.requires_grad_(token_grads)
    return tokens, linear(tokens, counts.cumsum(0).to(torch.int32))


def run_backward(output, micro_batch):
    generator = torch.Generator().manual_seed(100 + micro_batch)
    output.backward(torch.randn(output.shape, generator=generator).bfloat16())


def run(linear, micro_batch=0, **kwargs):
    tokens, output = run_forward(linear, micro_batch, **kwargs)
    run_backward(output, micro_batch)
    return tokens.grad


def assert_same_gradients(got, want):
    for mine, theirs in zip(gradients_of(got), gradients_of(want), strict=True):
        assert_bytes_equal(mine, theirs, what="wgrad")


@every_format
@every_layout
@pytest.mark.parametrize("depth", [1, 3], ids=["one at a time", "three behind"])
def test_delayed_gradients_are_those_of_the_backward_pass(format, layout, depth):
    """Over three micro-batches, oldest first, however many backward passes lie between."""
    for fuse, main_grads in product((True, False), repeat=2):
        delayed, direct = (
            make_linear(format, layout, delay=delay, fuse=fuse, main_grads=main_grads)
            for delay in (True, False)
        )
        for first in range(0, 3, depth):
            for micro_batch in range(first, first + depth):
                got, want = run(delayed, micro_batch), run(direct, micro_batch)
                assert_bytes_equal(got, want, what="dgrad")
            for _ in range(depth):
                delayed.backward_dw()
        assert_same_gradients(delayed, direct)
        counted = zip(delayed.weights(), direct.weights(), strict=True)
        assert all(mine.gradients == theirs.gradients == 3 for mine, theirs in counted)


@every_layout
def test_a_backward_pass_leaves_weights_alone(layout):
    """No gradient, not even an unwritten one, and no hook: a bucket may not be reduced yet. Tokens
    that want no gradient do not cost the weights theirs."""
    delayed, direct = (make_linear(layout=layout, delay=delay) for delay in (True, False))
    assert run(delayed, token_grads=False) is run(direct, token_grads=False) is None
    for weight in delayed.weights():
        assert weight.grad is None
        assert weight.gradients == 0
        assert_bytes_equal(weight.main_grad, torch.full(weight.shape, 0.5))
    delayed.backward_dw()
    assert_same_gradients(delayed, direct)


@every_layout
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_product_leaves_its_gradient_once(layout, reentrant):
    """Forward runs twice, the second time in the middle of the backward pass."""
    recomputed, direct = (make_linear(layout=layout, delay=delay) for delay in (True, False))
    tokens = torch.ones(8, 32).bfloat16().requires_grad_()
    ends = torch.tensor([3, 3, 8], dtype=torch.int32)
    run_backward(checkpoint(recomputed, tokens, ends, use_reentrant=reentrant), 0)
    run_backward(direct(tokens, ends), 0)
    for _ in range(2):  # the second call finds nothing
        recomputed.backward_dw()
    assert_same_gradients(recomputed, direct)
    assert all(weight.gradients == 1 for weight in recomputed.weights())


class _CallBackward(torch.autograd.Function):
    """Megatron's dispatch does so: weight gradients while tokens are sent back."""

    @staticmethod
    def forward(ctx, linear, tokens):
        ctx.linear = linear
        return tokens.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.linear.backward_dw()
        return None, grad


@every_layout
def test_a_gradient_may_be_computed_inside_the_same_backward_pass(layout):
    inside, direct = (make_linear(layout=layout, delay=delay) for delay in (True, False))
    tokens = torch.randn(8, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    tokens.requires_grad_()
    ends = torch.tensor([3, 3, 8], dtype=torch.int32)
    run_backward(inside(_CallBackward.apply(inside, tokens), ends), 0)
    run_backward(direct(tokens, ends), 0)
    assert_same_gradients(inside, direct)


def test_weights_that_are_frozen_before_their_turn_get_none():
    linear = make_linear()
    run(linear)
    linear.weight.requires_grad_(False)
    linear.backward_dw()
    linear.require_wgrads_taken()
    assert_bytes_equal(linear.weight.main_grad, torch.full(SHAPE, 0.5))


@pytest.mark.parametrize("delay", [True, False], ids=["delayed", "direct"])
def test_a_frozen_expert_gets_no_gradient_beside_others_that_do(delay):
    """Also where it was frozen after wrapping, and has a ``main_grad``."""
    partly, whole = (make_linear(layout="indexed", delay=delay) for _ in range(2))
    partly.weight1.requires_grad_(False)
    for linear in (partly, whole):
        run(linear)
        linear.backward_dw()
    assert_bytes_equal(partly.weight1.main_grad, torch.full(SHAPE[1:], 0.5))
    for index in (0, 2):
        got, want = partly.weights()[index], whole.weights()[index]
        assert_bytes_equal(got.main_grad, want.main_grad)
    assert [weight.gradients for weight in partly.weights()] == [1, 0, 1]


@every_layout
@pytest.mark.parametrize("delay", [True, False], ids=["delayed", "direct"])
def test_a_pass_for_the_gradient_of_tokens_alone_leaves_weights_alone(layout, delay):
    """``main_grad`` included: no hook would tell its bucket that it holds something."""
    linear = make_linear(layout=layout, delay=delay)
    tokens, output = run_forward(linear, 0)
    torch.autograd.grad(output.sum(), tokens, retain_graph=True)
    torch.autograd.backward(output.sum(), inputs=[tokens])
    linear.require_wgrads_taken()
    for weight in linear.weights():
        assert weight.gradients == 0
        assert_bytes_equal(weight.main_grad, torch.full(weight.shape, 0.5))


@every_layout
def test_a_gradient_that_is_asked_for_is_returned_and_not_accumulated(layout):
    asked, direct = (make_linear(layout=layout, delay=False, main_grads=m) for m in (True, False))
    _, output = run_forward(asked, 0)
    gradients = torch.autograd.grad(output.sum(), asked.weights())
    _, output = run_forward(direct, 0)
    output.sum().backward()
    for got, weight, want in zip(gradients, asked.weights(), direct.weights(), strict=True):
        assert_bytes_equal(got, want.grad)
        assert_bytes_equal(weight.main_grad, torch.full(weight.shape, 0.5))


def test_gradients_of_gradients_are_refused():
    """The graph of a backward pass would lack what depends on the weights."""
    linear = make_linear(delay=False, main_grads=False)
    tokens, output = run_forward(linear, 0)
    (gradient,) = torch.autograd.grad(output.square().sum(), tokens, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.square().sum().backward()


def test_evaluation_and_direct_gradients_leave_nothing():
    """Megatron calls ``backward_dw`` of every linear, whatever the configuration."""
    evaluated, direct = make_linear(), make_linear(delay=False)
    with torch.no_grad():
        run_forward(evaluated, 0)
    run(direct)
    for linear, count in ((evaluated, 0), (direct, 1)):
        linear.require_wgrads_taken()
        linear.backward_dw()
        assert linear.weight.gradients == count


# Gradients that nobody computes


def test_gradients_left_behind_are_named_before_a_step():
    linear = make_linear()
    run(linear, 0)
    run(linear, 1)
    for left in (2, 1):
        with pytest.raises(StateError, match=rf"^experts\.linear_fc1\.weight: .* got {left} still"):
            linear.require_wgrads_taken()
        linear.backward_dw()
    linear.require_wgrads_taken()


def test_gradients_of_a_pass_that_was_given_up_are_dropped():
    """Otherwise the next pass would take them for its own, oldest first."""
    linear, other = make_linear(), make_linear()
    run(linear, 0)
    linear.drop_delayed_wgrads()
    for one in (linear, other):
        run(one, 1)
        one.backward_dw()
        one.require_wgrads_taken()
    assert_bytes_equal(linear.weight.main_grad, other.weight.main_grad)


@every_layout
def test_a_step_that_lost_gradients_does_not_go_unnoticed(layout):
    """Weights were requantized with a gradient still to come: the next forward pass raises."""
    linear = make_linear(layout=layout)
    run(linear)
    run_forward(linear, 1)  # the next micro-batch may start before
    for weight in linear.weights():
        bind(weight.quantized_storage).gather()
    with pytest.raises(StateError, match=r"expected the gradients of all backward passes"):
        run_forward(linear, 2)
