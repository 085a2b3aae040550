"""The grouped product is a loop over experts, to the bit: forward, dgrad and wgrad."""

import pytest
import torch

from moe_optim.errors import LayoutError, StateError
from moe_optim.experts import grouped_gemm
from moe_optim.experts.grouped_linear import GroupedLinear
from moe_optim.formats import MXFP8, reference
from moe_optim.weights.storage import Weights
from tests.support.bytes import assert_bytes_equal
from tests.support.formats import REPRESENTATIVE_FORMATS
from tests.support.inputs import wide_range_weights
from tests.support.states.buckets import bind
from tests.support.states.copies import every_copy

SHAPE = (3, 64, 32)
ROUTINGS = {  # tokens of each expert
    "every expert has tokens": (5, 8, 3),
    "the first has none": (0, 9, 7),
    "the middle has none": (4, 0, 12),
    "the last has none": (1, 15, 0),
    "one has all": (0, 16, 0),
    "no tokens at all": (0, 0, 0),
}
every_routing = pytest.mark.parametrize("counts", ROUTINGS.values(), ids=ROUTINGS.keys())
every_layout = pytest.mark.parametrize("layout", ["grouped", "indexed"])
every_storage = pytest.mark.parametrize(
    "format", [None, *REPRESENTATIVE_FORMATS.values()], ids=["bf16", *REPRESENTATIVE_FORMATS]
)


def make_linear(format, layout, seed=0, fuse=True, shape=SHAPE):
    """Return a linear whose rowwise and columnwise copies differ where the format has two."""
    linear = GroupedLinear(
        *shape,
        format=format,
        expert_layout=layout,
        fuse_wgrad_accumulation=fuse,
        name="experts.linear_fc1",
    )
    values = wide_range_weights(*shape, seed=seed, exponents=(-8, 8)).bfloat16()
    linear.load_values(values)
    assert len(linear.weights()) == (1 if layout == "grouped" else shape[0])
    return linear


def make_tokens(counts, features, seed=1):
    """Return [T, C] bf16 activations that want a gradient, and where each expert's tokens end."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(sum(counts), features, generator=generator).bfloat16().requires_grad_()
    return tokens, torch.tensor(counts).cumsum(0).to(torch.int32)


def per_expert(rows, counts):
    return rows.detach().split(list(counts))


def weights_of(linear, direction):
    """Return the [R, C] weights of all experts from the oracle, given what was loaded."""
    if linear.storage is None:
        experts = linear.weights()
        return list(experts[0].detach()) if len(experts) == 1 else [e.detach() for e in experts]
    return list(reference.dequantize(linear.storage.quantized, direction).bfloat16())


def loop_forward(tokens, linear, counts):
    pairs = zip(per_expert(tokens, counts), weights_of(linear, "rowwise"), strict=True)
    return torch.cat([part @ weight.t() for part, weight in pairs])


def loop_dgrad(output_grad, linear, counts):
    pairs = zip(per_expert(output_grad, counts), weights_of(linear, "columnwise"), strict=True)
    return torch.cat([part @ weight for part, weight in pairs])


def loop_wgrad(output_grad, tokens, counts):
    pairs = zip(per_expert(output_grad, counts), per_expert(tokens, counts), strict=True)
    return torch.stack([grad.t() @ part for grad, part in pairs])


def run(linear, counts, seed=1):
    """Return tokens, output and output gradient after a forward and a backward pass."""
    tokens, ends = make_tokens(counts, linear.shape[2], seed)
    output = linear(tokens, ends)
    output_grad = make_tokens(counts, linear.shape[1], seed + 1)[0].detach()
    output.backward(output_grad)
    return tokens, output, output_grad


def test_the_copies_of_the_test_weights_differ():
    """Otherwise no test here could tell them apart."""
    linear = make_linear(MXFP8, "grouped")
    assert not torch.equal(linear.operand("rowwise"), linear.operand("columnwise"))


@every_storage
@every_layout
@every_routing
def test_products_equal_a_loop_over_experts(format, layout, counts):
    """Forward multiplies the rowwise copy, dgrad the columnwise one, wgrad the activations."""
    linear = make_linear(format, layout)
    tokens, output, output_grad = run(linear, counts)
    assert_bytes_equal(output, loop_forward(tokens, linear, counts), what="output")
    assert_bytes_equal(tokens.grad, loop_dgrad(output_grad, linear, counts), what="dgrad")
    wgrad = loop_wgrad(output_grad, tokens, counts)
    parts = [wgrad] if layout == "grouped" else wgrad.unbind(0)
    for weight, part in zip(linear.weights(), parts, strict=True):
        assert_bytes_equal(weight.grad, part, what="wgrad")


@every_storage
@every_layout
def test_one_call_multiplies_all_experts(format, layout, monkeypatch):
    """A forward is one grouped product and a backward two, however many experts there are."""
    calls = []

    def counting(*args, **kwargs):
        calls.append(args)
        return torch.nn.functional.grouped_mm(*args, **kwargs)

    monkeypatch.setattr(grouped_gemm, "grouped_mm", counting)
    linear = make_linear(format, layout)
    tokens, ends = make_tokens((5, 8, 3), 32)
    output = linear(tokens, ends)
    assert len(calls) == 1
    output.sum().backward()
    assert len(calls) == 3


def test_gradients_nobody_wants_are_not_computed(monkeypatch):
    linear = make_linear(MXFP8, "grouped")
    tokens, ends = make_tokens((5, 8, 3), 32)
    linear(tokens.detach(), ends).sum().backward()
    assert tokens.grad is None
    assert linear.weight.grad is not None
    linear.weight.grad = None
    linear.requires_grad_(False)
    linear(tokens, ends).sum().backward()
    assert tokens.grad is not None
    assert linear.weight.grad is None


def test_parameters_are_named_after_megatrons_layouts():
    grouped, indexed = (make_linear(MXFP8, layout) for layout in ("grouped", "indexed"))
    assert {n: tuple(p.shape) for n, p in grouped.named_parameters()} == {"weight": SHAPE}
    assert {n: tuple(p.shape) for n, p in indexed.named_parameters()} == {
        f"weight{i}": SHAPE[1:] for i in range(3)
    }


def test_a_shape_that_the_format_cannot_hold_is_refused_by_name():
    with pytest.raises(LayoutError, match=r"^fc2\.weight: mxfp8 needs .* got \[48, 32\]"):
        GroupedLinear(2, 48, 32, format=MXFP8, name="fc2")


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
    run_passes_once(linear)
    fused = [weight.main_grad.clone() - 0.5 for weight in linear.weights()]
    seen = []
    for weight in linear.weights():
        weight.main_grad.fill_(0.5)
        weight.grad = None
        register(weight, lambda gradient: seen.append(gradient.clone()))
    run_passes_once(linear)
    for weight, gradient in zip(linear.weights(), fused, strict=True):
        assert any(torch.equal(gradient, one.float()) for one in seen)
        assert (weight.main_grad == 0.5).all()
        assert not weight.grad_added_to_main_grad


def run_passes_once(linear):
    tokens, ends = make_tokens((5, 8, 3), SHAPE[2])
    linear(tokens, ends).sum().backward()


def give_main_grads(linear, dtype):
    for weight in linear.weights():
        weight.main_grad = torch.full(weight.shape, 0.5, dtype=dtype)


@every_storage
@every_layout
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_fused_accumulation_equals_adding_what_autograd_gives(format, layout, dtype):
    """Over three micro-batches, ``main_grad`` holds the same bits either way."""
    fused, unfused = (make_linear(format, layout, fuse=fuse) for fuse in (True, False))
    give_main_grads(fused, dtype)
    give_main_grads(unfused, dtype)
    for seed in range(3):
        run(fused, (5, 8, 3), seed)
        run(unfused, (5, 8, 3), seed)
        for weight in unfused.weights():
            weight.main_grad.add_(weight.grad)
            weight.grad = None
    for got, want in zip(fused.weights(), unfused.weights(), strict=True):
        assert_bytes_equal(got.main_grad, want.main_grad)
        assert got.grad_added_to_main_grad
        assert not hasattr(want, "grad_added_to_main_grad")


@every_layout
def test_fused_accumulation_still_shows_autograd_a_gradient(layout):
    """DDP's hooks count parameters by their gradients, and assert that there is one."""
    linear = make_linear(MXFP8, layout)
    give_main_grads(linear, torch.float32)
    run(linear, (5, 8, 3))
    for weight in linear.weights():
        assert weight.grad.shape == weight.shape
        assert weight.grad.dtype == torch.bfloat16


# Weights at the wrong time


def set_fresh(linear, fresh):
    for weight in linear.weights():
        bind(weight.quantized_storage).is_now(Weights.FRESH if fresh else Weights.STALE)


@every_layout
def test_stale_weights_are_not_multiplied(layout):
    """Neither forward nor backward, and all is well once they are fresh again."""
    linear = make_linear(MXFP8, layout)
    tokens, ends = make_tokens((5, 8, 3), 32)
    output = linear(tokens, ends)
    set_fresh(linear, False)
    with pytest.raises(StateError, match=r"^experts\.linear_fc1\.weight0?: .*start_param_sync"):
        linear(tokens, ends)
    with pytest.raises(StateError, match="start_param_sync"):
        output.sum().backward()
    set_fresh(linear, True)
    linear(tokens, ends).sum().backward()


def test_one_stale_expert_is_enough():
    linear = make_linear(MXFP8, "indexed")
    bind(linear.weight1.quantized_storage).is_now(Weights.STALE)
    tokens, ends = make_tokens((5, 8, 3), 32)
    with pytest.raises(StateError, match=r"^experts\.linear_fc1\.weight1: "):
        linear(tokens, ends)


REWRITES = {
    "copy_": lambda weight: weight.data.copy_(torch.ones(weight.shape)),
    "a gather": lambda weight: bind(weight.quantized_storage).gather(),
}


@every_layout
@pytest.mark.parametrize("rewrite", REWRITES.values(), ids=REWRITES.keys())
@pytest.mark.parametrize("which", [0, -1], ids=["first", "last"])
def test_weights_rewritten_between_forward_and_backward_raise(layout, rewrite, which):
    """The backward pass would multiply with weights the forward pass never saw."""
    linear = make_linear(MXFP8, layout)
    tokens, ends = make_tokens((5, 8, 3), 32)
    output = linear(tokens, ends)
    rewrite(linear.weights()[which])
    with pytest.raises(StateError, match="rewritten between forward and backward"):
        output.sum().backward()
    assert tokens.grad is None


@every_layout
def test_bf16_weights_rewritten_between_forward_and_backward_raise(layout):
    """As torch itself raises where a weight it saved for backward has changed."""
    linear = make_linear(None, layout)
    tokens, ends = make_tokens((5, 8, 3), 32)
    output = linear(tokens, ends)
    with torch.no_grad():
        linear.weights()[0].zero_()
    with pytest.raises((StateError, RuntimeError)):
        output.sum().backward()
    assert tokens.grad is None


@every_storage
@every_layout
def test_weights_exchanged_between_forward_and_backward_raise(format, layout):
    """Also for weights that were written as often."""
    linear, other = make_linear(format, layout), make_linear(format, layout, seed=1)
    tokens, ends = make_tokens((5, 8, 3), 32)
    output = linear(tokens, ends)
    linear.weights()[-1].data = other.weights()[-1].data
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


@every_storage
def test_an_expanded_gradient_of_no_tokens_is_taken(format):
    """As that of a sum is: its strides are zero, whatever its shape."""
    linear = make_linear(format, "grouped", fuse=False)
    tokens, ends = make_tokens((0, 0, 0), SHAPE[2])
    linear(tokens, ends).sum().backward()
    assert tokens.grad.shape == tokens.shape
    assert not any(weight.grad.any() for weight in linear.parameters())
