"""Wire ``quantized`` without processes: every rank is an object, every collective a loop.

Ranks begin with other bytes in all that they do not own, so that what did not travel shows.
"""

from functools import reduce
from math import lcm

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_optim.buckets.layout import aligned_end, side_by_side
from moe_optim.buckets.states import Event
from moe_optim.errors import LayoutError, StateError
from moe_optim.formats import FORMATS, MXFP8, MXFP8_2D, NVFP4, reference
from moe_optim.weights.grouped_weight import GroupedWeight
from moe_optim.weights.storage import PortableStorage
from tests.support.bytes import assert_bytes_equal
from tests.support.formats import REPRESENTATIVE_FORMATS, fitting
from tests.support.inputs import wide_range_weights, with_specials
from tests.support.states.buckets import make_bucket, make_params, own_masters

EVERY_FORMAT = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
ONE_OF_EACH_PATH = pytest.mark.parametrize(
    "format", REPRESENTATIVE_FORMATS.values(), ids=REPRESENTATIVE_FORMATS
)
SIZES = (1, 3, 8)
STOCK, ALIGNED = "stock", "aligned"


def bucket_numel(format, slots, dp_size, layout):
    divisor = lcm(dp_size, 128)
    if layout == ALIGNED:
        return aligned_end(format, slots, dp_size=dp_size, divisor=divisor).numel
    return -(-slots[-1].end // divisor) * divisor


class Rank:
    """One rank's bucket, its weights full of bytes of its own, and its share of the masters."""

    def __init__(self, rank, dp_size, format, slots, numel, masters):
        self.params = make_params(format, slots)
        for param in self.params:
            for buffer in param.quantized_storage.quantized.buffers().values():
                buffer.view(torch.uint8).fill_(0x11 + rank)
        self.masters = own_masters(self.params, slots, masters, rank, numel // dp_size)
        grads = torch.zeros(numel, dtype=torch.bfloat16)
        self.bucket = make_bucket(self.params, slots, grads, dp_size=dp_size, masters=self.masters)
        self.gather = self.bucket.gather

    def buffers(self, index):
        return self.params[index].quantized_storage.quantized.buffers()


def encode_all(ranks):
    """Do what a bucket group does before anything but maxima travels."""
    for rank in ranks:
        rank.bucket.state.record(Event.SETTLE)
        rank.bucket.open_gather()
    exchanges = [rank.gather.exchange for rank in ranks]
    assert len({None if e is None else e.numel() for e in exchanges}) == 1
    if exchanges[0] is not None:
        largest = reduce(torch.maximum, exchanges)
        for exchange in exchanges:
            exchange.copy_(largest)
    for rank in ranks:
        rank.gather.encode()


def gather_all(ranks):
    """Do what a bucket group does, the collectives by hand. Every rank takes part in each."""
    encode_all(ranks)
    for buffers in zip(*(rank.gather.sliced for rank in ranks), strict=True):
        whole = torch.cat([one.chunk(len(ranks))[i] for i, one in enumerate(buffers)])
        for buffer in buffers:
            buffer.copy_(whole)
    for buffers in zip(*(rank.gather.reduced for rank in ranks), strict=True):
        largest = reduce(torch.maximum, buffers)
        for buffer in buffers:
            buffer.copy_(largest)
    for rank in ranks:
        rank.bucket.finish()


def make_ranks(format, shapes, dp_size, layout, masters):
    slots = side_by_side(shapes)
    numel = bucket_numel(format, slots, dp_size, layout)
    return [Rank(rank, dp_size, format, slots, numel, masters) for rank in range(dp_size)]


def masters_of(shapes, seed=0):
    ordinary = [wide_range_weights(*shape, seed=seed + i) for i, shape in enumerate(shapes)]
    return [with_specials(master, every=1009).float() for master in ordinary]


def assert_all_ranks_hold(ranks, format, masters):
    for index, master in enumerate(masters):
        expected = reference.quantize(master, format).buffers()
        for number, rank in enumerate(ranks):
            for name, buffer in rank.buffers(index).items():
                assert_bytes_equal(buffer, expected[name], what=f"rank {number}, {index}, {name}")


SHAPES = {  # rows and columns that every format takes; and FP8 blocks that are not whole
    "two linears": ((4, 64, 96), (4, 96, 32)),
    "one wide expert": ((1, 32, 512),),
}


@EVERY_FORMAT
@pytest.mark.parametrize("layout", [ALIGNED, STOCK])
@pytest.mark.parametrize("dp_size", SIZES)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_sharded_equals_full(format, layout, dp_size, shapes):
    """Every rank ends with every byte of the oracle's, special values included, also twice."""
    shapes = [fitting(format, shape) for shape in shapes]
    for seed in (0, 100):
        masters = masters_of(shapes, seed)
        if seed == 0:
            ranks = make_ranks(format, shapes, dp_size, layout, masters)
        else:  # the same tables, other values in the same masters
            for rank in ranks:
                for one in rank.masters:
                    index = next(i for i, p in enumerate(rank.params) if p is one.param)
                    part = masters[index].view(-1)[one.start : one.start + one.master.numel()]
                    one.master.copy_(part)
        gather_all(ranks)
        assert_all_ranks_hold(ranks, format, masters)


@settings(max_examples=30)
@given(data=st.data())
@ONE_OF_EACH_PATH
def test_any_bucket_at_any_size(format, data):
    """Shapes, sizes, ranks and layouts that hypothesis finds; ranks that own nothing among them."""
    multiple = format.dimension_multiple
    blocks = st.integers(1, 4).map(lambda n: n * multiple)
    columns = st.integers(1, 150) if multiple == 1 else blocks
    rows = columns if multiple > 1 and not format.is_row_only else st.integers(1, 150)
    shape = st.tuples(st.integers(1, 3), rows, columns)
    shapes = data.draw(st.lists(shape, min_size=1, max_size=3), label="shapes")
    dp_size = data.draw(st.integers(1, 12), label="ranks")
    layout = data.draw(st.sampled_from([ALIGNED, STOCK]), label="layout")
    masters = masters_of(shapes, seed=data.draw(st.integers(0, 99), label="seed"))
    numel = bucket_numel(format, side_by_side(shapes), dp_size, layout)
    if numel // dp_size % format.elements_per_byte:
        with pytest.raises(LayoutError, match="layout: aligned"):
            make_ranks(format, shapes, dp_size, layout, masters)
        return
    ranks = make_ranks(format, shapes, dp_size, layout, masters)
    gather_all(ranks)
    assert_all_ranks_hold(ranks, format, masters)


def test_aligned_shards_exchange_nothing_and_cut_ones_only_what_they_cut():
    """Two experts [64, 512]: halves are whole block rows; thirds cut one in each expert."""
    shapes = ((2, 64, 512),)
    masters = masters_of(shapes)
    half = make_ranks(MXFP8, shapes, 2, ALIGNED, masters)
    gather_all(half)
    assert half[0].gather.exchange is None
    third = make_ranks(MXFP8, shapes, 3, STOCK, masters)
    gather_all(third)
    assert third[0].gather.exchange.numel() == 2 * (2 * 512)  # columns and runs of two block rows


def test_weights_live_in_the_memory_that_is_gathered():
    """Gathered buffers are views of the bucket; MXFP8 2-D has one data buffer for both ways."""
    shapes = SHAPES["two linears"]
    (rank,) = make_ranks(MXFP8_2D, shapes, 1, ALIGNED, masters_of(shapes))
    data, scale = rank.gather.sliced
    assert len(rank.params) == len(shapes)
    for param in rank.params:
        q = param.quantized_storage.quantized
        for buffer, memory in ((q.rowwise_data, data), (q.rowwise_scale, scale)):
            start = memory.data_ptr()
            assert start <= buffer.data_ptr() < start + memory.numel()
        assert q.columnwise_data.data_ptr() == q.rowwise_data.data_ptr()


def test_binding_keeps_the_bytes_of_the_weights():
    """What was loaded or drawn before the model was wrapped is still there afterwards."""
    storage = PortableStorage(MXFP8, (2, 64, 64), name="weight0")
    storage.write(masters_of([(2, 64, 64)])[0])
    before = {name: buffer.clone() for name, buffer in storage.quantized.buffers().items()}
    param = torch.nn.Parameter(GroupedWeight(storage))
    make_bucket([param], side_by_side([(2, 64, 64)]), torch.zeros(8192, dtype=torch.bfloat16))
    assert storage.quantized.buffers().keys() == before.keys() == set(MXFP8.buffer_names)
    for name, buffer in storage.quantized.buffers().items():
        assert_bytes_equal(buffer, before[name], what=name)


def test_a_bucket_of_two_formats_is_refused():
    params = [
        torch.nn.Parameter(GroupedWeight(PortableStorage(format, (1, 64, 64), name="weight")))
        for format in (MXFP8, NVFP4)
    ]
    slots = side_by_side([(1, 64, 64)] * 2)
    with pytest.raises(LayoutError, match="one format in a bucket, got mxfp8, nvfp4"):
        make_bucket(params, slots, torch.zeros(8192, dtype=torch.bfloat16))


def test_encoding_before_opening_is_refused():
    shapes = SHAPES["one wide expert"]
    (rank,) = make_ranks(MXFP8, shapes, 1, ALIGNED, masters_of(shapes))
    with pytest.raises(StateError, match="expected masters to gather from, got none"):
        rank.gather.encode()
