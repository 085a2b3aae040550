"""A quantized weight is one bf16 parameter to torch: what shares bytes, copies them, or refuses."""

import copy
import io
import pickle
from itertools import product

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_optim.errors import StateError
from moe_optim.experts.grouped_linear import GroupedLinear
from moe_optim.formats import FORMATS, MXFP8, MXFP8_2D, reference
from moe_optim.weights import grouped_weight
from moe_optim.weights.grouped_weight import GroupedWeight
from moe_optim.weights.storage import PortableStorage, Weights
from tests.support.bytes import assert_bytes_equal, assert_same_tensors
from tests.support.formats import fitting
from tests.support.inputs import normal_weights, wide_range_weights
from tests.support.ranks import run_ranks
from tests.support.states.buckets import bind, pointers
from tests.support.states.copies import every_copy

SHAPE = (2, 64, 32)
every_format = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS.keys())
both_layouts = pytest.mark.parametrize("layout", ["grouped", "indexed"])


def make_weight(seed=0, format=MXFP8, shape=SHAPE, name="experts.weight"):
    """Return a parameter over the quantized bytes of wide-range values."""
    storage = PortableStorage(format, shape, name=name)
    storage.write(wide_range_weights(*shape, seed=seed))
    return torch.nn.Parameter(GroupedWeight(storage))


def make_linear(layout, seed=0, format=MXFP8):
    linear = GroupedLinear(*SHAPE, format=format, expert_layout=layout)
    linear.load_values(wide_range_weights(*SHAPE, seed=seed).bfloat16(), keep_for_masters=True)
    return linear


def buffers_of(weight):
    return weight.quantized_storage.quantized.buffers()


def snapshot(weight):
    return {name: buffer.clone() for name, buffer in buffers_of(weight).items()}


def share_memory(a, b):
    return pointers(a.quantized_storage) == pointers(b.quantized_storage)


# What it is


@every_format
def test_it_looks_like_the_logical_bf16_weight_and_reads_as_its_rowwise_values(format):
    """Shape, dtype, numel and the type name are what buffers and optimizers count and branch on;
    any torch function sees what the rowwise buffers stand for, bf16."""
    shape = fitting(format, SHAPE)
    weight = make_weight(format=format, shape=shape)
    assert (weight.shape, weight.dtype) == (shape, torch.bfloat16)
    assert (weight.numel(), weight.element_size()) == (2 * 64 * shape[2], 2)
    assert weight.type() == "torch.BFloat16Tensor"
    assert weight.is_contiguous()
    expected = reference.dequantize(weight.quantized_storage.quantized).bfloat16()
    assert_bytes_equal(weight.dequantize(), expected)
    assert_bytes_equal(weight.detach() * 1, expected)
    assert_bytes_equal(torch.zeros(weight.shape).copy_(weight.detach()), expected.float())
    one = weight.quantized_storage.expert(1)
    matrix = GroupedWeight(one, shape[1:])
    assert_bytes_equal(matrix.dequantize(), expected[1])


# What shares the storage

ALIASES = {
    "detach": lambda w: w.detach(),
    "data": lambda w: w.data,
    "alias": lambda w: w.alias(),
    "a shallow copy": copy.copy,
    "expand_as itself": lambda w: w.expand_as(w),
    "expand to its own shape": lambda w: w.expand(*SHAPE),
    "bfloat16": lambda w: w.bfloat16(),
    "to its own dtype": lambda w: w.to(torch.bfloat16),
    "to its own device": lambda w: w.to("cpu"),
    "to its own type": lambda w: w.type("torch.BFloat16Tensor"),
}


@pytest.mark.parametrize("alias", ALIASES.values(), ids=ALIASES.keys())
def test_aliases_share_every_buffer(alias):
    """Nothing is dequantized, and a write through the alias is a write to the weight."""
    weight = make_weight()
    other = alias(weight)
    assert isinstance(other, GroupedWeight)
    assert other.shape == weight.shape
    assert share_memory(other, weight)
    values = wide_range_weights(*SHAPE, seed=1)
    other.detach().copy_(values)
    assert_same_tensors(buffers_of(weight), reference.quantize(values, MXFP8).buffers())


def test_a_shallow_copy_of_a_parameter_is_one_with_the_same_attributes():
    weight = make_weight().requires_grad_(False)
    weight.shards = [1, 2]
    other = copy.copy(weight)
    assert isinstance(other, torch.nn.Parameter) and not other.requires_grad
    assert other.shards is weight.shards


def test_expand_as_reaches_the_gradient_accumulator():
    """DDP hangs its hooks on the node behind ``param.expand_as(param)``."""
    weight = make_weight()
    ((accumulator, _),) = weight.expand_as(weight).grad_fn.next_functions
    seen = []
    accumulator.register_hook(lambda *_: seen.append(weight.grad is not None))
    weight.float().sum().backward()
    assert seen == [True]


# What copies the storage


@both_layouts
def test_deepcopy_of_a_linear_shares_within_the_copy_and_not_with_the_original(layout):
    """Experts of one storage become experts of one copy, the one that the product reads."""
    linear = make_linear(layout)
    other = copy.deepcopy(linear)
    assert not set(pointers(other.storage)) & set(pointers(linear.storage))
    for index, (weight, original) in enumerate(zip(other.weights(), linear.weights(), strict=True)):
        part = other.storage if layout == "grouped" else other.storage.expert(index)
        assert isinstance(weight, torch.nn.Parameter)
        assert pointers(weight.quantized_storage) == pointers(part)
        assert_same_tensors(buffers_of(weight), buffers_of(original))
        weight.data.copy_(torch.zeros(weight.shape))
    assert not other.operand("rowwise").any()
    assert linear.operand("rowwise").any()


@both_layouts
@every_copy
def test_a_copied_linear_keeps_what_the_storage_knows(layout, transfer):
    """Initial values for the masters, staleness and names go along with the bytes."""
    linear = make_linear(layout)
    initial = [weight.get_high_precision_init_val().clone() for weight in linear.weights()]
    names = [weight.quantized_storage.name for weight in linear.weights()]
    for weight in linear.weights():
        bind(weight.quantized_storage).is_now(Weights.STALE)
    linear = copy.deepcopy(linear)  # stale, and bound no more, so that it may also be moved
    other = transfer(linear)
    assert [weight.quantized_storage.name for weight in other.weights()] == names
    for weight, values in zip(other.weights(), initial, strict=True):
        assert not weight.quantized_storage.is_fresh
        assert_bytes_equal(weight.get_high_precision_init_val(), values)


def test_deepcopy_keeps_attributes_gradient_state_and_parameterhood():
    weight = make_weight()
    weight.allreduce, weight.shards = False, [1, 2]
    weight.requires_grad_(False)
    other = copy.deepcopy(weight)
    assert isinstance(other, torch.nn.Parameter)
    assert not other.requires_grad
    assert (other.allreduce, other.shards) == (False, [1, 2])
    assert other.shards is not weight.shards
    assert not share_memory(other, weight)
    assert not isinstance(copy.deepcopy(weight.detach()), torch.nn.Parameter)


def test_a_copy_of_a_weight_in_training_has_no_part_in_that_training():
    """What DDP and the optimizer have hung on the original is theirs: the copy accumulates into a
    gradient of its own."""
    linear = GroupedLinear(2, 32, 64, format=MXFP8, name="fc1")
    linear.load_values(wide_range_weights(2, 32, 64).bfloat16())
    weight = linear.weight
    weight.main_grad, weight.main_param = torch.zeros(2, 32, 64), torch.zeros(2, 32, 64)
    weight.grad_added_to_main_grad = True
    other = copy.deepcopy(linear)
    for name in ("main_grad", "main_param", "grad_added_to_main_grad"):
        assert not hasattr(other.weight, name)
    tokens, ends = torch.ones(4, 64).bfloat16(), torch.tensor([2, 4], dtype=torch.int32)
    other(tokens, ends).sum().backward()
    assert_bytes_equal(other.weight.grad, torch.full((2, 32, 64), 2.0).bfloat16())
    assert not weight.main_grad.any()


# What modules do to their parameters

OTHER_DTYPE = {
    "float()": lambda m: m.float(),
    "half()": lambda m: m.half(),
    "to(float32)": lambda m: m.to(torch.float32),
    "type(float32)": lambda m: m.type(torch.float32),
}


@both_layouts
@pytest.mark.parametrize("convert", OTHER_DTYPE.values(), ids=OTHER_DTYPE.keys())
def test_a_linear_does_not_take_another_dtype(layout, convert):
    linear = make_linear(layout)
    before = linear.operand("rowwise")
    with pytest.raises(StateError, match=r"weight: mxfp8 weights cannot become torch\.float"):
        convert(linear)
    assert_bytes_equal(linear.operand("rowwise"), before)


@pytest.mark.filterwarnings("ignore:.*which is a no-op")
@both_layouts
@every_format
def test_weights_on_meta_take_no_values_until_to_empty_gives_them_memory(layout, format):
    """A write to meta would be lost without a word, as in a load with ``assign=True``."""
    shape = fitting(format, SHAPE)
    source = GroupedLinear(*shape, format=format, expert_layout=layout, bias=True)
    source.load_values(wide_range_weights(*shape).bfloat16(), keep_for_masters=True)
    values, state = source.operand("rowwise"), source.state_dict()
    linear = copy.deepcopy(source).to("meta")
    assert {parameter.device.type for parameter in linear.parameters()} == {"meta"}
    plain = {name: value.clone() for name, value in state.items()}
    for loaded, assign in product((state, plain), (False, True)):
        with pytest.raises(RuntimeError, match=r"got a weight on meta\. Call to_empty\(device"):
            copy.deepcopy(linear).load_state_dict(loaded, assign=assign)
    with pytest.raises(NotImplementedError, match=r"no data! Please use .*to_empty"):
        copy.deepcopy(linear).to("cpu")
    for parameter in linear.parameters():
        parameter.allreduce = False
    linear.to_empty(device="cpu")
    assert not any(parameter.allreduce for parameter in linear.parameters())
    assert all(storage.initial is None for storage in linear.storages())
    assert [storage.format for storage in linear.storages()] == [format] * len(linear.weights())
    linear.load_state_dict(state)
    assert_bytes_equal(linear.operand("rowwise"), values)


@both_layouts
def test_a_function_of_values_changes_the_values(layout):
    linear = make_linear(layout)
    doubled = linear.operand("rowwise") * 2
    linear._apply(lambda tensor: tensor * 2)
    assert_bytes_equal(linear.operand("rowwise"), doubled)
    assert all(storage.initial is None for storage in linear.storages())


# Writing


@settings(max_examples=20)
@given(seed=st.integers(0, 2**31), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_copy_is_quantize_for_all_values(seed, dtype):
    """fp32 is rounded to bf16 once, so it makes no difference who rounds."""
    values = wide_range_weights(*SHAPE, seed=seed)
    weight = make_weight()
    weight.data.copy_(values.to(dtype))
    assert_same_tensors(buffers_of(weight), reference.quantize(values, MXFP8).buffers())


def test_copy_of_an_equal_storage_copies_bytes():
    """Not values: a requantization of dequantized values moves scales. No byte is left out."""
    source, target = make_weight(seed=1), make_weight(seed=2)
    for buffer in buffers_of(source).values():
        buffer.random_(0, 256)  # bytes that no quantization gives
    target.data.copy_(source)
    assert_same_tensors(buffers_of(target), buffers_of(source))
    assert not share_memory(target, source)


def test_copy_from_another_format_requantizes_values():
    source, target = make_weight(seed=1, format=MXFP8_2D), make_weight(seed=2)
    target.data.copy_(source)
    expected = reference.quantize(source.dequantize(), MXFP8)
    assert_same_tensors(buffers_of(target), expected.buffers())


LOST_WRITES = {
    "zero_": lambda w: w.zero_(),
    "add_": lambda w: w.add_(1),
    "normal_": lambda w: w.normal_(),
    "resize_": lambda w: w.resize_(1),
    "set_": lambda w: w.set_(torch.zeros(3).bfloat16()),
    "an out= argument": lambda w: torch.add(torch.ones(SHAPE).bfloat16(), 1, out=w),
    "_foreach_mul_": lambda w: torch._foreach_mul_([w], 2.0),
    "_foreach_copy_": lambda w: torch._foreach_copy_([w], [torch.ones(SHAPE).bfloat16()]),
}
LOST_VIEW_WRITES = {
    "an index": lambda w: w[0].fill_(1),
    "an assignment": lambda w: w.__setitem__(0, 1.0),
    "view": lambda w: w.view(-1).add_(1),
    "unbind": lambda w: w.unbind(0)[1].zero_(),
    "transpose": lambda w: w.transpose(1, 2).zero_(),
}


@pytest.mark.parametrize("write", LOST_WRITES.values(), ids=LOST_WRITES.keys())
def test_other_writes_in_place_raise_and_change_nothing(write):
    """They would go to a dequantized copy and be lost."""
    weight = make_weight()
    before, version = snapshot(weight), weight.quantized_storage.version
    with pytest.raises(StateError, match=r"^experts\.weight: aten\..* be lost\. .* copy_\(\)"):
        write(weight.data)
    assert_same_tensors(buffers_of(weight), before)
    assert weight.quantized_storage.version == version


@pytest.mark.parametrize("write", LOST_VIEW_WRITES.values(), ids=LOST_VIEW_WRITES.keys())
def test_writes_through_a_view_raise_or_arrive(write):
    """A view of plain weights takes writes; here one may refuse, and may not drop them."""
    weight = make_weight()
    plain = weight.dequantize()
    write(plain)
    try:
        write(weight.data)
    except StateError:
        return
    assert_bytes_equal(weight.dequantize(), plain)


def test_data_takes_storage_of_its_shape_and_no_plain_tensor():
    """A plain tensor there is what DDP assigns to a model that was wrapped too early. A bucket
    would go on gathering into the storage it was made with, and nobody would read it."""
    weight, other = make_weight(), make_weight(seed=1, name="other.weight")
    before = snapshot(weight)
    with pytest.raises(StateError, match=r"experts\.weight: .*torch\.float32.* call install\(\)"):
        weight.data = torch.zeros(SHAPE)
    with pytest.raises(
        StateError, match=r"expected a weight of \[2, 64, 32\], got .*\[2, 32, 64\]"
    ):
        weight.data = make_weight(shape=(2, 32, 64)).data
    assert_same_tensors(buffers_of(weight), before)
    weight.data = other.data
    assert share_memory(weight, other)
    bound = make_weight()
    bind(bound.quantized_storage)
    with pytest.raises(StateError, match=r"^experts\.weight: data: .* got that of other\.weight\."):
        bound.data = other.data
    bound.data = bound.data
    assert_same_tensors(buffers_of(bound), before)


NEITHER_READ = r"^experts\.weight: .*earlier step.*start_param_sync"
NOR_WRITTEN = r"^experts\.weight: .*going to overwrite.*start_param_sync"
BEHIND = {
    "float": (lambda w: w.float(), NEITHER_READ),
    "arithmetic": (lambda w: w + 1, NEITHER_READ),
    "copy into a plain tensor": (lambda w: torch.zeros(SHAPE).copy_(w), NEITHER_READ),
    "copy into a weight": (lambda w: make_weight(seed=1).data.copy_(w), NEITHER_READ),
    "copy into a format": (lambda w: make_weight(format=MXFP8_2D).data.copy_(w), NEITHER_READ),
    "pickle": (lambda w: pickle.dumps(w), NEITHER_READ),
    "copy_": (lambda w: w.copy_(torch.zeros(())), NOR_WRITTEN),
    "copy_ from a weight": (lambda w: w.copy_(make_weight(seed=1)), NOR_WRITTEN),
}


@pytest.mark.parametrize(("call", "message"), BEHIND.values(), ids=BEHIND.keys())
def test_a_weight_behind_its_masters_is_neither_read_nor_written(call, message):
    """No value of an earlier step gets out by any function, and its gather, begun or still to come,
    would have the last word; handling the weight is allowed."""
    weight = make_weight()
    before = snapshot(weight)
    bind(weight.quantized_storage).is_now(Weights.STALE)
    assert weight.detach().expand_as(weight).shape == SHAPE
    assert "experts.weight" in repr(weight)
    with pytest.raises(StateError, match=message):
        call(weight.data)
    assert_same_tensors(buffers_of(weight), before)


@pytest.mark.parametrize(
    "source", [wide_range_weights(*SHAPE, seed=1), make_weight(seed=1)], ids=["plain", "quantized"]
)
def test_a_copy_of_a_weight_behind_its_masters_is_read_once_it_has_values_of_its_own(source):
    """No gather reaches it: an average of the weights may be kept in a copy of the model."""
    weight = make_weight()
    bind(weight.quantized_storage).is_now(Weights.STALE)
    other = copy.deepcopy(weight)
    with pytest.raises(StateError, match="earlier step"):
        other.dequantize()
    other.data.copy_(source)
    assert_bytes_equal(other.dequantize(), make_weight(seed=1).dequantize())
    assert not weight.quantized_storage.is_fresh


# Values kept for the masters


@both_layouts
def test_masters_start_from_the_values_before_quantization(layout):
    """Until they are cleared; then from what the bytes stand for."""
    values = wide_range_weights(*SHAPE).bfloat16()
    linear = GroupedLinear(*SHAPE, format=MXFP8, expert_layout=layout)
    linear.load_values(values, keep_for_masters=True)
    parts = [values] if layout == "grouped" else values.unbind(0)
    for weight, part in zip(linear.weights(), parts, strict=True):
        assert_bytes_equal(weight.get_high_precision_init_val(), part)
        weight.clear_high_precision_init_val()
        assert_bytes_equal(weight.get_high_precision_init_val(), weight.dequantize())
        assert not torch.equal(weight.dequantize(), part)


GIVEN = {
    "plain values": lambda: wide_range_weights(*SHAPE, seed=7),
    "a weight with its values": lambda: make_linear("grouped", seed=7).weight,
    "a weight without": lambda: make_weight(seed=7),
    "a weight in another format": lambda: make_weight(seed=7, format=MXFP8_2D),
}


@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN.keys())
def test_whatever_is_written_before_there_are_masters_is_what_they_start_from(given):
    """In bf16, through any alias and without touching the giver; later nothing is kept."""
    source = given()
    plain = not isinstance(source, GroupedWeight)
    want = source.bfloat16() if plain else source.get_high_precision_init_val()
    linear = make_linear("grouped")
    copied = copy.deepcopy(linear)
    before = copied.weight.get_high_precision_init_val().clone()
    with torch.no_grad():
        linear.weight.data.copy_(source)
    if plain:
        source.zero_()
    assert_bytes_equal(linear.weight.get_high_precision_init_val(), want)
    assert_bytes_equal(copied.weight.get_high_precision_init_val(), before)
    linear.weight.clear_high_precision_init_val()
    with torch.no_grad():
        linear.weight.copy_(before)
    assert linear.weight.quantized_storage.initial is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_values_written_over_kept_ones_are_kept_as_precisely(dtype):
    """Modules keep what they load, fp32 as well, and write it afterwards."""
    weight, values = make_weight(), wide_range_weights(*SHAPE, seed=1)
    weight.quantized_storage.initial = torch.zeros(SHAPE, dtype=dtype)
    weight.data.copy_(values)
    assert_bytes_equal(weight.get_high_precision_init_val(), values.to(dtype))


# Leaving the process


FORMATS_SENT = ("mxfp8", "nvfp4")


def _broadcast():
    dist.init_process_group("gloo")
    sent = []
    for name in FORMATS_SENT:
        for is_async in (False, True):
            weight = make_weight(seed=dist.get_rank(), format=FORMATS[name])
            storage = weight.quantized_storage
            storage.initial = normal_weights(*SHAPE, seed=dist.get_rank()).bfloat16()
            before = storage.version
            work = dist.broadcast(weight.data, src=0, async_op=is_async)
            if is_async:
                work.wait()
            assert storage.version > before
            sent.append((snapshot(weight), weight.get_high_precision_init_val()))
    return sent


def test_broadcast_sends_the_buffers():
    """Every rank ends with rank 0's bytes, the columnwise ones included, and with the values that
    masters are made of; blocking or not."""
    drawn = normal_weights(*SHAPE, seed=0).bfloat16()
    for rank, sent in enumerate(run_ranks(2, _broadcast)):
        for name, (buffers, initial) in zip(sorted(2 * FORMATS_SENT), sent, strict=True):
            expected = snapshot(make_weight(seed=0, format=FORMATS[name]))
            assert_same_tensors(buffers, expected, what=f"{name} on rank {rank}")
            assert_bytes_equal(initial, drawn)


LOADED = [(torch.float32, None), (None, torch.bfloat16), (torch.float32, torch.bfloat16)]


def _broadcast_what_ranks_loaded_unlike():
    dist.init_process_group("gloo")
    rank, sent = dist.get_rank(), []
    for dtypes in LOADED:
        weight = make_weight(seed=rank)
        values = normal_weights(*SHAPE, seed=rank)
        weight.quantized_storage.initial = dtypes[rank] and values.to(dtypes[rank])
        dist.broadcast(weight.data, src=0)
        sent.append((snapshot(weight), weight.quantized_storage.initial))
    return sent


def test_a_broadcast_also_sends_whether_there_are_initial_values():
    """A rank that loads alone and broadcasts keeps what it loads, in its dtype; others have none,
    or what they were built with."""
    drawn, expected = normal_weights(*SHAPE, seed=0), snapshot(make_weight(seed=0))
    for rank, sent in enumerate(run_ranks(2, _broadcast_what_ranks_loaded_unlike)):
        for (dtype, _), (buffers, initial) in zip(LOADED, sent, strict=True):
            assert_same_tensors(buffers, expected, what=f"rank {rank}")
            if dtype is None:
                assert initial is None
            else:
                assert_bytes_equal(initial, drawn.to(dtype))


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_a_backend_that_waits_itself_returns_no_work(dtype):
    """As NCCL does without ``async_op``."""
    weight, sent = make_weight(), []
    weight.quantized_storage.initial = dtype and normal_weights(*SHAPE)

    def broadcast(tensors, *_):
        sent.extend(tensors)
        return tensors, None

    _, work = grouped_weight._broadcast(broadcast, [weight.data])
    assert work is None
    assert len(sent) == 1 + (dtype is not None) + len(buffers_of(weight))


LOST_RESULTS = {
    "all_reduce": dist.all_reduce,
    "reduce": lambda w: dist.reduce(w, 0),
    "recv": lambda w: dist.recv(w, tag=1),
    "scatter": lambda w: dist.scatter(w, [torch.ones(SHAPE).bfloat16()], 0),
    "all_gather_into_tensor": lambda w: dist.all_gather_into_tensor(w, w.dequantize()),
    "all_to_all_single": lambda w: dist.all_to_all_single(w, w.dequantize()),
}


def _write_by_collectives():
    dist.init_process_group("gloo")
    for name, write in LOST_RESULTS.items():
        weight = make_weight()
        with pytest.raises(StateError, match=r"c10d\..* be lost\. .* copy_\(\)"):
            write(weight.data)
        parts = [torch.zeros(SHAPE).bfloat16()]
        dist.all_gather(parts, weight.data)
        assert_bytes_equal(parts[0], weight.dequantize(), what=name)


def test_collectives_read_a_weight_and_raise_where_they_would_write_into_it():
    run_ranks(1, _write_by_collectives)


def _broadcast_a_parameter():
    dist.init_process_group("gloo")
    weight = torch.nn.Parameter(make_weight(seed=0), requires_grad=False)
    with pytest.raises(StateError, match=r"broadcast: expected `\.data`.*dequantize\(\)"):
        dist.broadcast(weight, src=0, async_op=True)
    return True


def test_a_broadcast_of_a_parameter_is_refused():
    """Receivers would take its buffers for bf16: slime and miles broadcast such to plain tensors,
    where `--rematerialize-param-from-master-weight` gives them the parameters of the model."""
    assert run_ranks(1, _broadcast_a_parameter) == [True]


PICKLES = {
    "pickle": lambda w: pickle.loads(pickle.dumps(w)),
    "copyreg protocol 2": lambda w: pickle.loads(pickle.dumps(w, protocol=2)),
    "torch.save": lambda w: torch.load(_saved(w), weights_only=True),
}


def _saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("transfer", PICKLES.values(), ids=PICKLES.keys())
@pytest.mark.parametrize("trains", [True, False], ids=["trained", "frozen"])
def test_a_pickled_parameter_is_a_plain_parameter(transfer, trains):
    """So that a linear that is pickled whole still trains, in bf16."""
    weight = make_weight().requires_grad_(trains)
    loaded = transfer(weight)
    assert type(loaded) is torch.nn.Parameter
    assert loaded.requires_grad is trains
    assert_bytes_equal(loaded.detach(), weight.dequantize())


@both_layouts
def test_a_state_dict_loads_into_the_same_bytes(layout):
    linear, other = make_linear(layout), make_linear(layout, seed=1)
    other.load_state_dict(linear.state_dict())
    for name, buffer in other.storage.quantized.buffers().items():
        assert_bytes_equal(buffer, linear.storage.quantized.buffers()[name], what=name)


def _assign_data(linear, other):
    for weight, theirs in zip(linear.weights(), other.weights(), strict=True):
        weight.data = theirs.data


HAND_OVERS = {
    "data": _assign_data,
    "load_state_dict(assign=True)": lambda a, b: a.load_state_dict(b.state_dict(), assign=True),
}


@both_layouts
@pytest.mark.parametrize("hand_over", HAND_OVERS.values(), ids=HAND_OVERS.keys())
def test_the_product_follows_its_parameters(layout, hand_over):
    """Storage handed to a parameter is the storage that is multiplied, or it is refused."""
    linear, other = make_linear(layout), make_linear(layout, seed=1)
    try:
        hand_over(linear, other)
    except StateError:
        return
    values = [weight.detach().float().view(-1, *SHAPE[1:]) for weight in linear.weights()]
    assert_bytes_equal(linear.operand("rowwise").float(), torch.cat(values))


@both_layouts
@pytest.mark.parametrize("bound", [False, True], ids=["free", "in a bucket"])
def test_assigned_values_are_quantized(layout, bound):
    """A plain tensor in its place would be multiplied in bf16, and no bucket would know of it."""
    linear, other = make_linear(layout), make_linear(layout, seed=1)
    for storage in linear.storages() if bound else ():
        bind(storage)
    before = [weight.quantized_storage for weight in linear.weights()]
    state = {name: weight.dequantize() for name, weight in other.state_dict().items()}
    linear.load_state_dict(state, assign=True)
    assert [weight.quantized_storage for weight in linear.weights()] == before
    for weight, values in zip(linear.weights(), state.values(), strict=True):
        assert_bytes_equal(weight.dequantize(), values)
