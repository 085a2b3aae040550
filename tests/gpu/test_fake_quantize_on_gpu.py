"""One launch forward and one backward fake-quantize experts anywhere in the memory of a GPU."""

import math

import pytest
import torch

from moe_optim.calibration.fake_operations import clipped_gradient, fake_quantized
from moe_optim.calibration.fake_quantization import PER_EXPERT_GRIDS, fake_quantize
from moe_optim.errors import NonFiniteError, StateError
from moe_optim.experts.grouped_linear import GroupedLinear
from moe_optim.formats import FORMATS
from moe_optim.kernels.plan import BoundKernel
from tests.support.bytes import assert_values_equal
from tests.support.inputs import normal_weights, wide_range_weights, with_specials
from tests.support.number_formats.fake_values import (
    GRIDS,
    by_grid,
    gradient_tensors,
    value_tensors,
)

pytestmark = pytest.mark.gpu

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
every_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
every_grid = pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
every_axis = pytest.mark.parametrize("axis", [0, None])

SHAPES = ((1, 1), (3, 5), (64, 64), (1, 4097), (96, 1408), (511, 1023), (1, 1), (768, 2048))
"""Whole tiles and others, one element, and one more than a tile."""


def scattered(shapes, dtype, *, make=normal_weights, aligned=False):
    """Return experts in memory of their own each, that begin all over 16 bytes if not aligned."""
    experts = []
    for index, (rows, cols) in enumerate(shapes):
        offset = 0 if aligned else index % 4
        memory = torch.full((rows * cols + 64,), math.nan, dtype=dtype, device="cuda")
        part = memory[offset : offset + rows * cols].view(rows, cols)
        experts.append(part.copy_(make(1, rows, cols, seed=index)[0].to(dtype)))
    return experts


def amax_of(experts, axis, part=0.4):
    found = torch.stack([one.nan_to_num(0, 1, -1).abs().max() for one in experts]).float() * part
    return found if axis == 0 else found.max()


def run(experts, amax, gradients, **options):
    leaves = [one.detach().requires_grad_() for one in experts]
    results = fake_quantize(leaves, amax, **options)
    return [one.detach() for one in results], torch.autograd.grad(results, leaves, gradients)


def assert_kernels_equal_the_reference(experts, axis, **grid):
    amax = amax_of(experts, axis)
    gradients = [torch.randn_like(one) for one in experts]
    kinds = [
        run(experts, amax, gradients, axis=axis, backend=name, **grid)
        for name in ("auto", "reference")
    ]
    on_cpu = [one.cpu() for one in experts]
    kinds.append(run(on_cpu, amax.cpu(), [one.cpu() for one in gradients], axis=axis, **grid))
    got, *wanted = kinds
    for want in wanted:
        for kind, mine, theirs in zip(("value", "gradient"), got, want, strict=True):
            for index, pair in enumerate(zip(mine, theirs, strict=True)):
                assert_values_equal(*(one.cpu() for one in pair), f"{kind} of {index}")


def specials(*shape, seed):
    return with_specials(wide_range_weights(*shape, seed=seed, exponents=(-30, 15)), every=7)


@every_dtype
@every_axis
@every_grid
def test_kernels_give_the_bits_of_the_reference_on_gpu_and_cpu(grid, axis, dtype):
    """Experts of several sizes, aligned or not; ordinary values, wide ones and special ones."""
    assert_kernels_equal_the_reference(scattered(SHAPES, dtype), axis, **grid)
    alike = [(257, 96)] * 5
    for make in (normal_weights, specials):
        for aligned in (False, True):
            experts = scattered(alike, dtype, make=make, aligned=aligned)
            assert_kernels_equal_the_reference(experts, axis, **grid)


@every_dtype
def test_values_and_gradients_of_the_table(dtype):
    for bits, narrow_range, cases in by_grid(dtype):
        values, amax, result = value_tensors(cases, dtype, "cuda")
        got = fake_quantize(values, amax, bits, narrow_range=narrow_range, check_values=False)
        assert_values_equal(got, result, f"{bits}")
    values, amax, gradients, wanted = gradient_tensors(dtype, "cuda")
    result = fake_quantize(values.requires_grad_(), amax, check_values=False)
    assert_values_equal(torch.autograd.grad(result, values, gradients)[0], wanted)


@pytest.mark.parametrize("bits", [8, "e4m3"])
def test_every_bf16_value_rounds_as_the_reference_rounds_it(bits):
    """All 65536 of them, by amaxes of many mantissas."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    amax = torch.rand(64, generator=torch.Generator().manual_seed(0)) * 3 + 0.01
    values = every.view(1, 256, 256).expand(64, -1, -1).contiguous()
    got = fake_quantize(values.cuda(), amax.cuda(), bits)
    assert_values_equal(got.cpu(), fake_quantize(values, amax, bits))


@pytest.mark.parametrize("format", [one for one in FORMATS if FORMATS[one].is_row_only])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_formats_give_the_bits_of_the_reference(format, dtype):
    """Experts of several sizes, aligned or not; ordinary values, wide ones and special ones."""
    shapes = [(1, 128), (257, 384), (64, 2048), (3, 128)]
    for make in (normal_weights, specials):
        for aligned in (False, True):
            experts = scattered(shapes, dtype, make=make, aligned=aligned)
            got = fake_quantize(experts, format=format)
            want = fake_quantize([one.cpu() for one in experts], format=format)
            for index, (mine, theirs) in enumerate(zip(got, want, strict=True)):
                assert_values_equal(mine.cpu(), theirs, f"{index}, {make.__name__}, {aligned}")


@pytest.mark.parametrize("count", [8, 128])
def test_there_is_one_launch_each_way_and_no_copy(count, monkeypatch):
    """Whatever the number of experts; beyond its result nothing is allocated but a table."""
    launches = []
    call = BoundKernel.__call__
    monkeypatch.setattr(
        BoundKernel,
        "__call__",
        lambda self, *given: (launches.append(self.kernel.__name__), call(self, *given)),
    )
    experts = scattered([(256, 512)] * count, torch.bfloat16, aligned=True)
    amax = amax_of(experts, 0)
    gradients = [torch.randn_like(one) for one in experts]
    run(experts, amax, gradients)
    launches.clear()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(experts, amax, gradients)
    assert launches == ["fake_quantize_kernel", "clip_gradient_kernel"]
    results = 2 * 2 * count * 256 * 512
    assert torch.cuda.max_memory_allocated() - before <= results + (1 << 16)


def test_a_checked_amax_is_not_waited_for_again():
    values, amax = normal_weights(4, 64, 64).cuda(), torch.ones(4, device="cuda")
    fake_quantize(values, amax)
    torch.cuda.set_sync_debug_mode("error")
    try:
        fake_quantize(values, amax)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    amax[2] = math.nan
    with pytest.raises(NonFiniteError, match="for expert 2"):
        fake_quantize(values, amax)


def test_a_captured_graph_quantizes_new_values():
    values, amax = normal_weights(4, 64, 64).cuda(), torch.full((4,), 0.03, device="cuda")
    parts, gradients = list(values.unbind(0)), list(torch.ones_like(values).unbind(0))
    fake_quantized(parts, amax, 8, False, "auto")
    clipped_gradient(parts, amax, gradients, "auto")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = fake_quantized(parts, amax, 8, False, "auto")
        grad = clipped_gradient(parts, amax, gradients, "auto")
    values.copy_(normal_weights(4, 64, 64, seed=1))
    graph.replay()
    assert_values_equal(got, fake_quantized(parts, amax, 8, False, "reference"))
    assert_values_equal(grad, clipped_gradient(parts, amax, gradients, "reference"))


def test_a_table_built_on_one_stream_is_read_on_another():
    values, amax = normal_weights(8, 64, 64).cuda(), torch.full((8,), 0.03, device="cuda")
    parts = [one.clone() for one in values]
    side = torch.cuda.Stream()
    torch.cuda._sleep(20_000_000)  # what is queued is not waited for
    first = fake_quantized(parts, amax, 8, False, "auto")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        second = fake_quantized(parts, amax, 8, False, "auto")
    torch.cuda.synchronize()
    assert_values_equal(first, second)
    assert_values_equal(first, fake_quantized(parts, amax, 8, False, "reference"))


def test_a_capture_refuses_addresses_that_it_does_not_know():
    amax = torch.ones(2, device="cuda")
    parts = [torch.ones(64, 64, device="cuda") for _ in range(2)]
    fake_quantized(parts, amax, 8, False, "auto")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(StateError, match="while a CUDA graph is captured"), torch.cuda.graph(graph):
        fake_quantized(parts[::-1], amax, 8, False, "auto")


@pytest.mark.usefixtures("alone")
def test_experts_of_more_than_two_to_the_31_elements():
    values = torch.zeros(1, 1, (1 << 31) + 4096, dtype=torch.bfloat16, device="cuda")
    values[..., -1] = 0.3
    got = fake_quantize(values, torch.ones(1, device="cuda"))
    want = fake_quantize(torch.full((1, 1, 1), 0.3).bfloat16(), torch.ones(1))
    assert got[..., -1].item() == want.item() and not got[..., :-1].any()


def make_linear(layout, **options):
    linear = GroupedLinear(4, 128, 256, format=None, expert_layout=layout, device="cuda", **options)
    linear.load_values(normal_weights(4, 128, 256).bfloat16().cuda())
    return linear


ENDS = (100, 100, 250, 300)


@pytest.mark.parametrize("layout", ["grouped", "indexed"])
@pytest.mark.parametrize("grid", PER_EXPERT_GRIDS.values(), ids=PER_EXPERT_GRIDS)
@pytest.mark.parametrize("calibrated", [False, True], ids=["live", "calibrated"])
def test_products_on_grids_are_the_references(calibrated, grid, layout):
    ends = torch.tensor(ENDS, dtype=torch.int32, device="cuda")
    outcomes = []
    for backend in ("auto", "reference"):
        linear = make_linear(layout, compute=grid, backend=backend)
        amax = torch.full((4, 1, 1), 0.02, device="cuda") if calibrated else None
        linear.register_buffer("calibrated_amax", amax)
        tokens = normal_weights(ENDS[-1], 256).bfloat16().cuda().requires_grad_()
        output = linear(tokens, ends)
        output.backward(torch.ones_like(output))
        grads = [weight.grad for weight in linear.weights()]
        outcomes.append((output.detach(), tokens.grad, *grads))
    for mine, theirs in zip(*outcomes, strict=True):
        assert_values_equal(mine, theirs)


def test_experts_of_their_own_are_multiplied_without_a_copy():
    linear = make_linear("indexed")
    tokens = torch.ones(ENDS[-1], 256, dtype=torch.bfloat16, device="cuda")
    ends = torch.tensor(ENDS, dtype=torch.int32, device="cuda")
    assert linear.operand("rowwise").data_ptr() == linear.weight0.data_ptr()
    with torch.no_grad():
        assert_values_equal(linear(tokens, ends), make_linear("grouped")(tokens, ends))


@pytest.mark.parametrize("listed", [False, True], ids=["tensor", "list"])
def test_inductor_gives_the_bits_of_eager_mode(listed):
    def product(experts, amax):
        return sum(expert.float().square().sum(0) for expert in fake_quantize(experts, amax))

    torch._dynamo.reset()
    graph = torch.compile(product, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step in range(2):
            values = normal_weights(4, 64, 96, seed=step).cuda()
            amax = amax_of(list(values), 0)
            found = []
            for function in (graph, product):
                experts = [one.clone().requires_grad_() for one in values]
                experts = experts if listed else values.clone().requires_grad_()
                leaves = experts if listed else [experts]
                gradients = torch.autograd.grad(function(experts, amax).sum(), leaves)
                found.append(torch.stack(gradients))
            assert torch.equal(*found)
    torch._dynamo.reset()
