"""``moe_optim.fake_quantize``: experts of one tensor or many, its errors, and compiled graphs."""

import math
from functools import partial

import pytest
import torch

from moe_optim.calibration import fake_quantization
from moe_optim.calibration.fake_quantization import fake_quantize
from moe_optim.errors import ConfigError, LayoutError, NonFiniteError
from moe_optim.formats import MXFP8
from moe_optim.formats.reference import fake as reference
from moe_optim.weights.grouped_weight import GroupedWeight
from moe_optim.weights.storage import PortableStorage
from tests.support.bytes import assert_bytes_equal
from tests.support.inputs import normal_weights, wide_range_weights
from tests.support.number_formats.fake_values import GRIDS

SHAPE = (4, 16, 24)
every_grid = pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
every_axis = pytest.mark.parametrize("axis", [0, None])


def weights(dtype=torch.bfloat16, seed=0):
    return wide_range_weights(*SHAPE, seed=seed, exponents=(-8, 4)).to(dtype)


def amax_of(values, axis=0, part=0.5):
    """Return amaxes that clip something."""
    found = values.detach().abs().float().amax((1, 2), keepdim=True) * part
    return found if axis == 0 else found.amax()


def run(experts, amax, gradients, *, quantize=fake_quantize, **options):
    """Return values and gradients of one tensor, or of a list."""
    listed = isinstance(experts, list)
    leaves = [one.detach().requires_grad_() for one in (experts if listed else [experts])]
    results = quantize(leaves if listed else leaves[0], amax, **options)
    results = results if listed else [results]
    return results, torch.autograd.grad(results, leaves, gradients)


@every_axis
@every_grid
def test_one_tensor_gives_the_definitions_values_and_gradients(grid, axis):
    values, gradient = weights(), weights(seed=1)
    amax = amax_of(values, axis)
    given = (0,) if axis == 0 else None  # ModelOpt's configurations write (0,)
    ((got,), (grad,)) = run(values, amax, [gradient], axis=given, **grid)
    bits = None if grid["bits"] == "e4m3" else grid["bits"]
    narrow = grid.get("narrow_range", False)
    assert_bytes_equal(
        got.detach(), reference.fake_quantize(values, amax, bits, narrow_range=narrow)
    )
    assert_bytes_equal(grad, reference.clip_gradient(values, amax, gradient))
    assert 0 < (grad != 0).sum() < (gradient != 0).sum()


@every_axis
@every_grid
def test_a_list_is_the_tensor_expert_by_expert(grid, axis):
    values, gradient = weights(), weights(seed=1)
    amax = amax_of(values, axis)
    ((whole,), (whole_grad,)) = run(values, amax, [gradient], axis=axis, **grid)
    scattered = [one.clone() for one in values]
    results, grads = run(scattered, amax, list(gradient.unbind(0)), axis=axis, **grid)
    assert_bytes_equal(torch.stack(results).detach(), whole.detach())
    assert_bytes_equal(torch.stack(grads), whole_grad)


def test_a_list_may_hold_experts_of_several_shapes():
    shapes = [(3, 5), (16, 24), (1, 1), (8, 2)]
    parts = [normal_weights(*shape, seed=i) for i, shape in enumerate(shapes)]
    amax = torch.stack([part.abs().max() for part in parts]) / 2
    results, grads = run(parts, amax, [torch.ones(shape) for shape in shapes], bits=4)
    for index, part in enumerate(parts):
        (one,), (grad,) = run(
            part[None], amax[index : index + 1], [torch.ones(1, *part.shape)], bits=4
        )
        assert_bytes_equal(results[index].detach(), one[0].detach())
        assert_bytes_equal(grads[index], grad[0])


def test_only_experts_that_want_a_gradient_get_one_and_the_amax_gets_none():
    parts = [one.clone().requires_grad_(index != 1) for index, one in enumerate(weights())]
    amax = amax_of(weights()).requires_grad_()
    sum(one.sum() for one in fake_quantize(parts, amax)).backward()
    assert amax.grad is None
    assert [part.grad is not None for part in parts] == [True, False, True, True]


def test_strides_and_expanded_gradients_do_not_matter():
    values = weights()
    turned = values.transpose(1, 2)
    ((got,), (grad,)) = run(
        turned, amax_of(values), [torch.ones(()).bfloat16().expand(turned.shape)]
    )
    ((want,), (want_grad,)) = run(values, amax_of(values), [torch.ones_like(values)])
    assert_bytes_equal(got.detach(), want.detach().transpose(1, 2))
    assert_bytes_equal(grad, want_grad.transpose(1, 2))


ERRORS = {
    "bits, too few": ({"bits": 1}, ConfigError, "bits: expected 2 to 16 or 'e4m3', got 1"),
    "backend": ({"backend": "x"}, ConfigError, "backend: expected auto or reference, got 'x'"),
    "no experts": ({"weights": []}, LayoutError, "at least one expert, got none"),
    "a matrix": (
        {"weights": torch.zeros(2, 2)},
        LayoutError,
        r"expected \[E, R, C\], got shape \[2, 2\]",
    ),
    "two dtypes": (
        {"weights": [torch.zeros(2, 2), torch.zeros(2, 2).half()]},
        LayoutError,
        r"weights\[1\]: .* got torch.float16 after torch.float32",
    ),
    "too few amaxes": (
        {"amax": torch.ones(1)},
        LayoutError,
        r"expected 2 for 2 experts .* shape \[1\]",
    ),
    "NaN": (
        {"amax": torch.tensor([1.0, math.nan])},
        NonFiniteError,
        "expected finite values, got nan for expert 1, and 1 such values of 2",
    ),
    "negative": ({"amax": torch.tensor([1.0, -2.0])}, ConfigError, "got -2.0 for expert 1"),
}


@pytest.mark.parametrize(("changed", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_bad_input_gets_one_clear_error(changed, error, message):
    good = {"weights": torch.zeros(2, 2, 2), "amax": torch.ones(2)}
    fake_quantize(**good)
    with pytest.raises(error, match=message):
        fake_quantize(**good | changed)


def test_quantized_weights_are_refused_by_their_type():
    weight = GroupedWeight(PortableStorage(MXFP8, (2, 32, 32)))
    with pytest.raises(LayoutError, match=r"got GroupedWeight. Give its values, dequantize\(\)"):
        fake_quantize(weight, torch.ones(2))


def test_values_are_read_again_once_an_amax_was_written(monkeypatch):
    """On a GPU, whose values are not read at every call; here a tensor that says it lies there."""
    amax, reads = torch.ones(2), []
    real = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: (reads.append(1), real(self))[1])
    monkeypatch.setattr(fake_quantization, "_is_read_anew", lambda amax: False)
    for expected in (1, 1):
        fake_quantization._check_values(amax)
        assert len(reads) == expected
    amax[1] = math.nan
    with pytest.raises(NonFiniteError, match="for expert 1"):
        fake_quantization._check_values(amax)
    fake_quantization._check_values(torch.ones(2))
    assert len(reads) == 3


@pytest.fixture
def compiled():
    """Return a function that compiles, whole, and never again."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield partial(torch.compile, fullgraph=True, backend="aot_eager")
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("grid", "listed", "axis"), [(GRIDS["8 bits"], True, 0), (GRIDS["e4m3"], False, None)]
)
def test_compiled_graphs_give_the_same_bits_and_are_compiled_once(compiled, grid, listed, axis):
    def product(experts, amax, tokens):
        found = fake_quantize(experts, amax, axis=axis, **grid)
        return sum(tokens @ expert.t() for expert in found)

    graph, leaves = compiled(product), {}
    for step in range(3):
        outcomes = []
        for run_it in (graph, product):
            values = weights(seed=step)
            experts = [one.clone() for one in values] if listed else values
            leaves = experts if listed else [experts]
            for leaf in leaves:
                leaf.requires_grad_()
            tokens = weights(seed=9)[0].clone().requires_grad_()
            out = run_it(experts, amax_of(values, axis), tokens)
            outcomes.append((out.detach(), *torch.autograd.grad(out.sum(), [tokens, *leaves])))
        for mine, theirs in zip(*outcomes, strict=True):
            assert_bytes_equal(mine, theirs, f"step {step}")
