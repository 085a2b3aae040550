"""The grouped product is a loop over experts, to the bit: forward, dgrad and wgrad."""

import pytest
import torch

from moe_optim.errors import LayoutError, StateError
from moe_optim.experts.grouped_linear import GroupedLinear
from moe_optim.formats import DIRECTIONS, MXFP8, reference
from moe_optim.weights.grouped_weight import GroupedWeight
from moe_optim.weights.storage import Weights
from tests.support.bytes import assert_bytes_equal
from tests.support.formats import REPRESENTATIVE_FORMATS
from tests.support.modules.compiling import make_linear, make_tokens
from tests.support.modules.experts import hook_as_ddp
from tests.support.states.buckets import bind
from tests.support.states.copies import every_copy

SHAPE = (3, 64, 32)
COUNTS = (5, 8, 3)
ROUTINGS = {  # tokens of each expert
    "every expert has tokens": COUNTS,
    "the first has none": (0, 9, 7),
    "the middle has none": (4, 0, 12),
    "the last has none": (1, 15, 0),
    "one has all": (0, 16, 0),
    "no tokens at all": (0, 0, 0),
}
every_layout = pytest.mark.parametrize("layout", ["grouped", "indexed"])
stored = pytest.mark.parametrize("format", [None, MXFP8], ids=["bf16", "mxfp8"])


def per_expert(rows, counts):
    return rows.detach().split(list(counts))


def weights_of(linear, direction):
    """Return the [R, C] weights of all experts from the oracle, given what was loaded."""
    if linear.storage is None:
        experts = linear.weights()
        return list(experts[0].detach()) if len(experts) == 1 else [e.detach() for e in experts]
    return list(reference.dequantize(linear.storage.quantized, direction).bfloat16())


def run(linear, counts, seed=1):
    """Return tokens, output and output gradient after a forward and a backward pass."""
    tokens, ends = make_tokens(linear, counts, seed)
    output = linear(tokens, ends)
    generator = torch.Generator().manual_seed(seed + 1)
    output_grad = torch.randn(output.shape, generator=generator).bfloat16()
    output.backward(output_grad)
    return tokens, output, output_grad


@pytest.mark.parametrize(
    "format", [None, *REPRESENTATIVE_FORMATS.values()], ids=["bf16", *REPRESENTATIVE_FORMATS]
)
@every_layout
def test_products_equal_a_loop_over_experts(format, layout):
    """Forward multiplies the rowwise copy, dgrad the columnwise one, wgrad the activations."""
    linear = make_linear(format, layout)
    assert len(linear.weights()) == (1 if layout == "grouped" else SHAPE[0])
    rowwise, columnwise = (weights_of(linear, direction) for direction in DIRECTIONS)
    if format is MXFP8:  # else no test here could tell the copies apart
        assert not torch.equal(rowwise[0], columnwise[0])
    for what, counts in ROUTINGS.items():
        tokens, output, output_grad = run(linear, counts)
        parts = [per_expert(rows, counts) for rows in (tokens, output_grad)]
        want = torch.cat([t @ w.t() for t, w in zip(parts[0], rowwise, strict=True)])
        assert_bytes_equal(output, want, what=f"{what}: output")
        want = torch.cat([g @ w for g, w in zip(parts[1], columnwise, strict=True)])
        assert_bytes_equal(tokens.grad, want, what=f"{what}: dgrad")
        wgrad = torch.stack([g.t() @ t for t, g in zip(*parts, strict=True)])
        wgrads = [wgrad] if layout == "grouped" else wgrad.unbind(0)
        for weight, part in zip(linear.weights(), wgrads, strict=True):
            assert_bytes_equal(weight.grad, part, what=f"{what}: wgrad")
        linear.zero_grad()


def test_gradients_nobody_wants_are_not_computed():
    linear = make_linear(MXFP8, "grouped")
    tokens, ends = make_tokens(linear, COUNTS)
    linear(tokens.detach(), ends).sum().backward()
    assert tokens.grad is None
    assert linear.weight.grad is not None
    linear.weight.grad = None
    linear.requires_grad_(False)
    linear(tokens, ends).sum().backward()
    assert tokens.grad is not None
    assert linear.weight.grad is None


def test_a_shape_that_the_format_cannot_hold_is_refused_by_name():
    with pytest.raises(LayoutError, match=r"^fc2\.weight: mxfp8 needs .* got \[48, 32\]"):
        GroupedLinear(2, 48, 32, format=MXFP8, name="fc2")


def test_tokens_may_have_any_strides():
    """GEMMs take whole 16 bytes only, which rows of columns-first tokens do not have."""
    plain, transposed = make_linear(MXFP8, "grouped"), make_linear(MXFP8, "grouped")
    tokens, ends = make_tokens(plain, COUNTS)
    output = plain(tokens, ends)
    output.sum().backward()
    columns_first = tokens.detach().t().contiguous().t().requires_grad_()
    got = transposed(columns_first, ends)
    got.sum().backward()
    assert_bytes_equal(got, output)
    assert_bytes_equal(columns_first.grad, tokens.grad)


# Weight gradients


HOOKS = {
    "register_hook": lambda weight, see: weight.register_hook(see),
    "register_post_accumulate_grad_hook": lambda weight, see: (
        weight.register_post_accumulate_grad_hook(lambda w: see(w.grad))
    ),
}


@every_layout
@pytest.mark.parametrize("register", HOOKS.values(), ids=HOOKS.keys())
def test_hooks_of_others_see_the_gradient_also_where_accumulation_is_fused(layout, register):
    """And it is not in ``main_grad`` yet, so that what they make of it counts."""
    linear = make_linear(MXFP8, layout)
    give_main_grads(linear, torch.float32)
    linear(*make_tokens(linear, COUNTS)).sum().backward()
    fused = [weight.main_grad.clone() - 0.5 for weight in linear.weights()]
    seen = []
    for weight in linear.weights():
        weight.main_grad.fill_(0.5)
        weight.grad = None
        register(weight, lambda gradient: seen.append(gradient.clone()))
    linear(*make_tokens(linear, COUNTS)).sum().backward()
    for weight, gradient in zip(linear.weights(), fused, strict=True):
        assert any(torch.equal(gradient, one.float()) for one in seen)
        assert (weight.main_grad == 0.5).all()
        assert not weight.grad_added_to_main_grad


def give_main_grads(linear, dtype):
    for weight in linear.weights():
        weight.main_grad = torch.full(weight.shape, 0.5, dtype=dtype)


@stored
@every_layout
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_fused_accumulation_equals_adding_what_autograd_gives(format, layout, dtype):
    """Over three micro-batches, ``main_grad`` holds the same bits either way. DDP's hooks
    assert that each parameter has a gradient."""
    fused, unfused = (make_linear(format, layout, fuse=fuse) for fuse in (True, False))
    give_main_grads(fused, dtype)
    give_main_grads(unfused, dtype)
    for seed in range(3):
        run(fused, COUNTS, seed)
        run(unfused, COUNTS, seed)
        for weight in unfused.weights():
            weight.main_grad.add_(weight.grad)
            weight.grad = None
    for got, want in zip(fused.weights(), unfused.weights(), strict=True):
        assert_bytes_equal(got.main_grad, want.main_grad)
        assert got.grad_added_to_main_grad
        assert (got.grad.shape, got.grad.dtype) == (got.shape, torch.bfloat16)
        assert not hasattr(want, "grad_added_to_main_grad")


@stored
@every_layout
@pytest.mark.parametrize("passes", [1, 2], ids=["in one pass", "in a pass of its own"])
@pytest.mark.parametrize("delay", [False, True], ids=["at once", "delayed"])
def test_gradients_of_other_uses_of_a_weight_count(format, layout, passes, delay):
    """As of a penalty in the loss, beside or behind fused accumulation, in each micro-batch."""
    linear = make_linear(format, layout, delay_wgrad=delay)
    give_main_grads(linear, torch.float32)
    nodes = [hook_as_ddp(weight) for weight in linear.weights()]
    for count in (1, 2):
        output = linear(*make_tokens(linear, COUNTS)).sum()
        penalty = sum((weight * 8).sum() for weight in linear.weights())
        for loss in [output + penalty] if passes == 1 else [output, penalty]:
            loss.backward()
        if delay:
            linear.backward_dw()
        oracle = make_linear(format, layout, fuse=False)
        oracle(*make_tokens(oracle, COUNTS)).sum().backward()
        for got, want in zip(linear.weights(), oracle.weights(), strict=True):
            whole = 0.5 + count * (want.grad.float() + 8)
            torch.testing.assert_close(got.main_grad, whole, rtol=1e-6, atol=1e-6)
    assert len(nodes) == len(linear.weights())


@stored
@every_layout
def test_a_weight_frozen_since_the_forward_pass_takes_no_gradient(format, layout):
    linear = make_linear(format, layout)
    give_main_grads(linear, torch.float32)
    tokens, ends = make_tokens(linear, COUNTS)
    output = linear(tokens, ends)
    linear.requires_grad_(False)
    output.sum().backward()
    assert tokens.grad is not None
    for weight in linear.weights():
        assert weight.grad is None
        assert (weight.main_grad == 0.5).all()


# Weights at the wrong time


@every_layout
@pytest.mark.parametrize("which", [0, -1], ids=["first", "last"])
def test_stale_weights_are_not_multiplied(layout, which):
    """Neither forward nor backward, not even one of several, and all is well once they are fresh
    again."""
    linear = make_linear(MXFP8, layout)
    tokens, ends = make_tokens(linear, COUNTS)
    output = linear(tokens, ends)
    bucket = bind(linear.weights()[which].quantized_storage)
    bucket.is_now(Weights.STALE)
    with pytest.raises(StateError, match=r"^experts\.linear_fc1\.weight[02]?: .*start_param_sync"):
        linear(tokens, ends)
    with pytest.raises(StateError, match="start_param_sync"):
        output.sum().backward()
    bucket.is_now(Weights.FRESH)
    linear(tokens, ends).sum().backward()


def _exchange(weight):
    layout = "grouped" if weight.dim() == 3 else "indexed"
    format = MXFP8 if isinstance(weight, GroupedWeight) else None
    weight.data = make_linear(format, layout, seed=1).weights()[-1].data  # written as often


REWRITES = {
    "copy_": (MXFP8, lambda weight: weight.data.copy_(torch.ones(weight.shape))),
    "a gather": (MXFP8, lambda weight: bind(weight.quantized_storage).gather()),
    "an exchange": (MXFP8, _exchange),
    "bf16 written": (None, lambda weight: weight.detach().zero_()),
    "bf16 exchanged": (None, _exchange),
}


@every_layout
@pytest.mark.parametrize(("format", "rewrite"), REWRITES.values(), ids=REWRITES.keys())
@pytest.mark.parametrize("which", [0, -1], ids=["first", "last"])
def test_weights_rewritten_between_forward_and_backward_raise(layout, format, rewrite, which):
    """The backward pass would multiply with weights the forward pass never saw."""
    linear = make_linear(format, layout)
    tokens, ends = make_tokens(linear, COUNTS)
    output = linear(tokens, ends)
    rewrite(linear.weights()[which])
    with pytest.raises(StateError, match="rewritten between forward and backward"):
        output.sum().backward()
    assert tokens.grad is None


@every_layout
@every_copy
def test_the_amax_of_whole_experts_is_that_of_the_bytes_it_was_set_for(layout, transfer):
    """It goes along with copies of them, and never comes back after a write."""
    linear = make_linear(MXFP8, layout)
    for _ in range(3):
        linear.load_values(torch.ones(SHAPE).bfloat16())
    linear.whole_amax = torch.tensor([7.0, 8.0, 9.0])
    other = transfer(linear)
    assert_bytes_equal(other.whole_amax, torch.tensor([7.0, 8.0, 9.0]))
    for _ in range(6):
        other.load_values(torch.ones(SHAPE).bfloat16())
        assert other.whole_amax is None
