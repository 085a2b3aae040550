"""Compiled as one graph, products and quantization give the bits of a run without compiling."""

import copy
from functools import partial

import pytest
import torch
from torch._dynamo.exc import TorchRuntimeError, Unsupported

import moe_optim
from moe_optim.buckets.offload import ParamData
from moe_optim.calibration.calibrated_amax import hold_calibrated_amax
from moe_optim.calibration.fake_quantization import PER_EXPERT_GRIDS
from moe_optim.errors import StateError
from moe_optim.formats import DIRECTIONS, INT4, MXFP8, NVFP4, QuantizedWeight, reference
from moe_optim.weights.storage import Weights
from tests.support.bytes import assert_bytes_equal, assert_same_tensors
from tests.support.formats import REPRESENTATIVE_FORMATS
from tests.support.inputs import wide_range_weights, with_specials
from tests.support.modules.compiling import (
    Compiled,
    compiling,
    make_linear,
    make_tokens,
    rewrite,
    run_passes,
)
from tests.support.states.buckets import bind

pytestmark = pytest.mark.slow

FORMATS = REPRESENTATIVE_FORMATS
every_layout = pytest.mark.parametrize("layout", ["grouped", "indexed"])
stored = pytest.mark.parametrize("format", [None, MXFP8], ids=["bf16", "mxfp8"])


@pytest.fixture(autouse=True)
def compiler():
    """Let this process compile, and start each test without graphs of another."""
    with compiling():
        yield


@pytest.fixture
def no_recompilation():
    """Return a context in which compiling anything again raises."""
    return torch._dynamo.config.patch(error_on_recompile=True)


# Quantizing and dequantizing


def make_master(seed=0):
    """Return [E, R, C] fp32 over a wide range, with zeros, infinities and NaN among it."""
    return with_specials(wide_range_weights(2, 128, 256, seed=seed))


def assert_same_buffers(got: QuantizedWeight, want: QuantizedWeight):
    assert (got.format, got.shape) == (want.format, want.shape)
    assert_same_tensors(got.buffers(), want.buffers(), what=want.format.name)
    is_own = "columnwise_data" in want.format.buffer_names
    assert (got.columnwise_data is got.rowwise_data) is not is_own


def quantize_to_all(master):
    """In every format, and by the name of one."""
    by_name = moe_optim.quantize(master, NVFP4.name, backend="reference")
    return [*(moe_optim.quantize(master, format) for format in FORMATS.values()), by_name]


def test_quantizing_gives_the_same_buffers(no_recompilation):
    """Also of other values, by the same graph; and no buffer wants a gradient."""
    compiled = Compiled(quantize_to_all)
    with no_recompilation:
        for seed in range(2):
            master = make_master(seed).requires_grad_()
            for got, want in zip(compiled(master), quantize_to_all(master), strict=True):
                assert_same_buffers(got, want)
                assert not any(buffer.requires_grad for buffer in got.buffers().values())
    assert compiled.graphs == 1


def dequantize_all(quantized):
    """In both directions, and one into memory."""
    values = [moe_optim.dequantize(q, way) for q in quantized for way in DIRECTIONS]
    q = next(one for one in quantized if one.format is NVFP4)
    out = torch.zeros(q.shape, dtype=torch.bfloat16)
    given = q.rowwise_data, q.rowwise_scale, q.format, "rowwise"
    return [*values, reference.dequantize_bf16(*given, global_amax=q.global_amax, out=out)]


def test_dequantizing_gives_the_same_values(no_recompilation):
    compiled = Compiled(dequantize_all)
    with no_recompilation:
        for seed in range(2):
            quantized = [reference.quantize(make_master(seed), one) for one in FORMATS.values()]
            for got, want in zip(compiled(quantized), dequantize_all(quantized), strict=True):
                assert_bytes_equal(got, want)
    assert compiled.graphs == 1


@pytest.mark.parametrize("format", [MXFP8, INT4], ids=lambda one: one.name)
def test_gradients_pass_by_weights_that_are_quantized_in_the_graph(format):
    """As without compiling: tokens get theirs, and the master none."""

    def multiply(tokens, master):
        return tokens @ moe_optim.dequantize(moe_optim.quantize(master, format))[0].t()

    compiled, gradients = Compiled(multiply), []
    for call in (multiply, compiled):
        tokens = torch.randn(8, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
        tokens.requires_grad_()
        master = wide_range_weights(1, 128, 256, exponents=(-4, 4)).requires_grad_()
        output = call(tokens, master)
        output.sum().backward()
        assert master.grad is None
        gradients.append({"output": output.detach(), "gradient": tokens.grad})
    assert_same_tensors(*gradients)
    assert compiled.graphs == 1


# Products


@pytest.mark.parametrize(
    ("grid", "layout"), [*zip(PER_EXPERT_GRIDS.values(), ("grouped", "indexed"), strict=True)]
)
def test_calibrated_amaxes_clip_gradients_in_graphs_too(grid, layout):
    """Where a weight is beyond the amax of its expert, which these are, its gradient is zero."""
    linear = make_linear(None, layout, compute=grid)
    amaxes = [
        weight.abs().float().quantile(0.5)
        for weight in torch.cat([w.detach().view(-1, *linear.shape[1:]) for w in linear.weights()])
    ]
    hold_calibrated_amax(linear, torch.stack(amaxes).view(-1, 1, 1))
    clipped = run_passes(linear, linear)
    assert_same_tensors(run_passes(Compiled(linear), linear), clipped)
    hold_calibrated_amax(linear, None)
    free = run_passes(linear, linear)
    assert not torch.equal(clipped["wgrad 0"], free["wgrad 0"])


def test_weights_that_a_bucket_has_moved_are_read_where_they_are(no_recompilation):
    linear = make_linear(MXFP8)
    compiled = Compiled(linear)
    run_passes(compiled, linear)
    buffers = linear.storage.quantized.buffers()
    bind(linear.storage, {name: torch.empty_like(buffer) for name, buffer in buffers.items()})
    rewrite(linear, seed=1)
    for buffer in buffers.values():
        buffer.view(torch.uint8).zero_()  # of before; nobody reads them
    with no_recompilation:
        assert_same_tensors(run_passes(compiled, linear), run_passes(linear, linear))


COUNTS = {  # tokens of each expert -> graphs that are there then
    (5, 8, 3): 1,
    (4, 9, 3): 1,  # as many tokens in all
    (5, 8, 4): 2,  # the number of tokens is a variable from here on
    (30, 0, 9): 2,
    (2, 0, 0): 2,
    (0, 1, 0): 3,  # torch compiles anew for one, and for none
    (0, 0, 0): 4,
    (7, 0, 0): 4,
}


def test_another_number_of_tokens_compiles_once_more_at_most():
    linear = make_linear(MXFP8)
    compiled = Compiled(linear)
    for counts, graphs in COUNTS.items():
        got, want = (run_passes(call, linear, counts) for call in (compiled, linear))
        assert_same_tensors(got, want, what=str(counts))
        assert compiled.graphs == graphs


@pytest.mark.parametrize("format", [None, MXFP8, NVFP4], ids=["bf16", "mxfp8", "nvfp4"])
def test_layers_share_a_graph_and_read_their_own_weights(format, no_recompilation):
    linears = [make_linear(format, seed=seed) for seed in range(2)]
    linears.append(copy.deepcopy(linears[0]))
    rewrite(linears[-1], seed=5)
    compiled = Compiled(lambda linear, tokens, ends: linear(tokens, ends))
    outputs = []
    with no_recompilation:
        for linear in linears:
            got = run_passes(lambda *given, own=linear: compiled(own, *given), linear)
            assert_same_tensors(got, run_passes(linear, linear))
            outputs.append(got["output"])
    assert compiled.graphs == 1
    assert not torch.equal(outputs[0], outputs[1])


@every_layout
def test_a_linear_that_is_called_twice_or_recomputed_gets_all_gradients(layout):
    """Also of equal tokens, where a compiler sees one product; in the backward pass of
    ``torch.utils.checkpoint`` a graph runs once more."""
    linear = make_linear(MXFP8, layout)

    def twice(tokens, ends):
        return linear(tokens, ends) + linear(tokens, ends)

    want, compiled = run_passes(twice, linear), Compiled(twice)
    assert_same_tensors(run_passes(compiled, linear), want)
    recomputed = partial(torch.utils.checkpoint.checkpoint, compiled, use_reentrant=False)
    assert_same_tensors(run_passes(recomputed, linear), want)
    assert compiled.graphs == 1


# Gradients that DDP accumulates


def accumulate_as_ddp(weight):
    """Do what Megatron's hook does when a gradient has arrived."""
    if weight.grad is not None and not weight.grad_added_to_main_grad:
        weight.main_grad.add_(weight.grad)
    weight.grad = None


def watch(linear, dtype):
    """Give every weight gradient memory that is not empty, and Megatron's hook."""
    for weight in linear.weights():
        weight.main_grad = torch.full(weight.shape, 0.5, dtype=dtype, device=weight.device)
        weight.grad_added_to_main_grad = False
        ((weight.accumulator, _),) = weight.expand_as(weight).grad_fn.next_functions
        weight.accumulator.register_hook(lambda *_, weight=weight: accumulate_as_ddp(weight))


@every_layout
@stored
def test_main_grads_are_those_of_fused_accumulation(format, layout):
    """Over three micro-batches, some of them not compiled, and whatever those have marked."""
    linear, want = make_linear(format, layout), make_linear(format, layout)
    watch(linear, torch.float32)
    watch(want, torch.float32)
    compiled = Compiled(linear)
    for seed, is_compiled in enumerate((True, False, True)):
        run_passes(compiled if is_compiled else linear, linear, seed=seed)
        run_passes(want, want, seed=seed)
        for got, fused in zip(linear.weights(), want.weights(), strict=True):
            assert_bytes_equal(got.main_grad, fused.main_grad)
            assert got.grad_added_to_main_grad == (not is_compiled)
            assert fused.grad_added_to_main_grad
    assert compiled.graphs == 1


# Weights at the wrong time


def test_stale_weights_are_not_multiplied_by_any_run_of_a_graph():
    """Neither forward nor backward, and all is well once they are fresh again."""
    linear = make_linear(MXFP8)
    bucket = bind(linear.storage)
    compiled = Compiled(linear)
    tokens, ends = make_tokens(linear, (5, 8, 3))
    output = compiled(tokens, ends)
    bucket.is_now(Weights.STALE)
    with pytest.raises(StateError, match=r"^experts\.linear_fc1\.weight: .*start_param_sync"):
        compiled(tokens, ends)
    with pytest.raises(StateError, match="start_param_sync"):
        output.sum().backward()
    bucket.is_now(Weights.FRESH)
    compiled(tokens, ends).sum().backward()
    assert compiled.graphs == 1


def test_products_call_the_hooks_that_gather_their_weights(no_recompilation):
    """At every run, also hooks that were not there when the graph was compiled."""
    linear = make_linear(MXFP8)
    bucket, compiled, called = bind(linear.storage), Compiled(linear.forward), []
    want = run_passes(linear, linear)

    def gather(module, _tokens):
        called.append(module)
        bucket.is_now(Weights.FRESH)

    with no_recompilation:
        assert_same_tensors(run_passes(compiled, linear), want)
        linear.register_forward_pre_hook(gather)
        for run in range(2):
            bucket.is_now(Weights.STALE)
            assert_same_tensors(run_passes(compiled, linear), want)
            assert called == [linear] * (run + 1)
    assert compiled.graphs == 1


def test_memory_that_is_stale_or_was_freed_is_not_read_by_a_graph():
    linear = make_linear(MXFP8)
    compiled = Compiled(lambda weight: weight.float().square().sum())
    assert_bytes_equal(compiled(linear.weight), linear.weight.float().square().sum())
    bucket, data = bind(linear.storage), ParamData([linear.storage])
    bucket.is_now(Weights.STALE)
    with pytest.raises(StateError, match="start_param_sync"):
        compiled(linear.weight)
    data.resize_(0)
    for weights in (Weights.FRESH, Weights.OFFLOADED):  # for every reason to free it
        bucket.is_now(weights)
        with pytest.raises(StateError, match=r"offloaded.*reload_from_cpu"):
            compiled(linear.weight)
    assert compiled.graphs == 1


@stored
def test_weights_written_between_forward_and_backward_are_found(format):
    linear = make_linear(format)
    output = Compiled(linear)(*make_tokens(linear, (5, 8, 3)))
    rewrite(linear, seed=1)
    with pytest.raises(StateError, match="rewritten between"):
        output.sum().backward()


WRITES = {
    "copy_": lambda weight: weight.copy_(torch.zeros(weight.shape, dtype=torch.bfloat16)),
    "mul_": lambda weight: weight.mul_(2),
    "view": lambda weight: weight.view(-1).zero_(),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_graphs_do_not_write_quantized_weights(write):
    linear = make_linear(MXFP8)
    before = linear.storage.dequantize()
    with torch.no_grad(), pytest.raises(TorchRuntimeError, match="StateError"):
        Compiled(write)(linear.weight)
    assert_bytes_equal(linear.storage.dequantize(), before)


def test_bf16_weights_written_in_the_graph_of_their_product_are_refused():
    """The linear would read them as they were when the graph began."""
    linear = make_linear(None)

    def write_and_multiply(tokens, ends):
        linear.weight.mul_(2)
        return linear(tokens, ends)

    with torch.no_grad(), pytest.raises(StateError, match="Write weights outside"):
        Compiled(write_and_multiply)(*make_tokens(linear, (5, 8, 3)))


def test_delayed_weight_gradients_are_refused():
    linear = make_linear(MXFP8, delay_wgrad=True)
    with pytest.raises(Unsupported, match="without delay_wgrad_compute"):
        Compiled(linear)(*make_tokens(linear, (5, 8, 3)))
