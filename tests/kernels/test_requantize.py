"""What the kernels write is the reference's, byte by byte, in code for GPUs that are not there."""

from itertools import product

import pytest
import torch
import triton
import triton.language as tl

from moe_optim.formats import (
    DIRECTIONS,
    FORMATS,
    FP8_BLOCK,
    FP8_BLOCK_FP32,
    INT4,
    MXFP8,
    NVFP4,
    NVFP4_ROWS,
    QuantizedWeight,
    reference,
)
from moe_optim.formats.partition import infer_partition
from moe_optim.formats.reference import scales
from moe_optim.kernels.encode import divide
from moe_optim.kernels.member_table import MemberTable, TableEntry
from moe_optim.kernels.plan import BoundKernel
from moe_optim.kernels.requantize_blocks import encode_scale
from moe_optim.kernels.requantize_rows import encode_row_scale
from tests.kernels.conftest import ONE_OF_EACH_PATH
from tests.support.bytes import assert_bytes_equal, assert_values_equal
from tests.support.formats import REPRESENTATIVE_FORMATS
from tests.support.inputs import SENTINEL, poisoned, wide_range_weights, with_specials
from tests.support.steps.stepping import (
    Stepping,
    Weight,
    assert_a_clip_of_zero_steps_without_gradients,
    gradients_of,
)

pytestmark = pytest.mark.slow

GAP = 40
SHAPES = {
    "mxfp8": ((2, 32, 128), (1, 32, 32), (3, 32, 96), (1, 96, 160)),
    "mxfp8_2d": ((2, 32, 256), (1, 32, 32), (3, 32, 96), (1, 96, 160)),
    "nvfp4": ((2, 32, 128), (1, 16, 16), (3, 32, 80), (1, 48, 272)),
    "fp8_block": ((2, 128, 128), (1, 130, 40), (1, 256, 136), (2, 7, 129)),
    "fp8_block_fp32": ((2, 128, 128), (1, 130, 40), (1, 256, 136), (2, 7, 129)),
    "mxfp8_rows": ((2, 33, 128), (1, 1, 32), (3, 7, 96)),
    "mxfp4": ((2, 33, 128), (1, 1, 32), (3, 7, 96)),
    "nvfp4_rows": ((2, 33, 128), (1, 1, 16), (3, 7, 80)),
    "int4": ((2, 33, 128), (1, 1, 32), (3, 7, 96)),
    "int4_g128": ((2, 33, 256), (1, 1, 128), (3, 7, 384)),
}
CLIPS = (1.0, 0.37)


def values_of(shape, seed):
    """Return fp32 values that round in every way, special ones among them."""
    return with_specials(wide_range_weights(*shape, seed=seed), every=601)


def padded(format, shape):
    """Return storage whose rows and experts lie apart, and the memory around its buffers."""
    q = QuantizedWeight.empty(format, shape)
    memories, views = {}, {}
    for name, buffer in q.buffers().items():
        if buffer.dim() == 1:
            views[name] = buffer.fill_(-1)
            continue
        experts, rows, cols = buffer.shape
        memory = torch.empty((experts, rows + 4, cols + 24), dtype=buffer.dtype)
        memory.view(torch.uint8).fill_(SENTINEL)
        memories[name], views[name] = memory, memory[:, :rows, :cols]
    return QuantizedWeight.of_buffers(format, shape, views.values()), memories


def storage_scales(format, shape):
    """Return scales as Transformer Engine stores them; it stores none of row-only formats."""
    ways = () if format.is_row_only else DIRECTIONS
    return {
        way: torch.full(
            (shape[0], *format.storage_scale_shape(*shape[1:], way)), 7, dtype=format.scale_dtype
        )
        for way in ways
    }


def assert_written(entries, masters):
    """Fail unless buffers and stored scales are those of the masters."""
    for entry, master in zip(entries, masters, strict=True):
        q = reference.quantize(master, entry.target.format)
        for name, buffer in entry.target.buffers().items():
            assert_bytes_equal(buffer, q.buffers()[name], what=f"{entry.target.shape} {name}")
        for way, scale in entry.storage_scales.items():
            expected = torch.full_like(scale, 7)
            reference.expand_scale_into(q, way, expected)
            assert_bytes_equal(scale, expected, what=f"{entry.target.shape} stored {way}")


def all_in_kernels(table):
    return not table.remainder and len(table.finish.kernels) == len(table.finish.calls)


FROM_BF16_EVERY_TIME = ("mxfp8", "fp8_block", "int4")
WHOLE = [
    *(pytest.param(one, torch.float32, False, False, id=name) for name, one in FORMATS.items()),
    *(
        pytest.param(
            *(one, torch.bfloat16, True, True),
            id=f"{name}, bf16, rows apart, zeroed behind it",
            marks=[] if name in FROM_BF16_EVERY_TIME else [pytest.mark.extended],
        )
        for name, one in FORMATS.items()
    ),
]


@pytest.mark.parametrize(("format", "dtype", "apart", "zero"), WHOLE)
def test_whole_weights_are_the_references(format, dtype, apart, zero, launches):
    """Whole and partial tiles in one launch, and nothing around them; sources and gaps are zeroed
    where that is asked for, and left alone where not."""
    shapes = SHAPES[format.name]
    numels = [experts * rows * cols for experts, rows, cols in shapes]
    memory = torch.full((sum(numels) + GAP * (len(shapes) + 1),), 7.0).to(dtype)
    entries, surroundings, start = [], [], GAP
    for seed, (shape, numel) in enumerate(zip(shapes, numels, strict=True)):
        source = memory[start : start + numel].view(shape).copy_(values_of(shape, seed))
        target, around = padded(format, shape) if apart else (poisoned(format, shape), {})
        surroundings += [(target.buffers()[name], memory) for name, memory in around.items()]
        scales = storage_scales(format, shape)
        entry = TableEntry(
            parameter=f"fc{seed}", source=source, target=target, storage_scales=scales
        )
        entries.append(entry)
        start += numel + GAP
    masters, before = [entry.source.clone() for entry in entries], memory.clone()
    table = MemberTable.build(entries, consumed=memory if zero else None)
    assert all_in_kernels(table) and table.zeroes_in_launch == zero
    table.launch()
    table.finish.launch()
    assert launches
    assert_written(entries, masters)
    assert_bytes_equal(memory, torch.zeros_like(memory) if zero else before, what="sources")
    for buffer, around in surroundings:
        inside = torch.zeros(around.shape, dtype=torch.bool)
        inside[:, : buffer.shape[1], : buffer.shape[2]] = True
        outside = around[~inside].view(torch.uint8)
        assert (outside == SENTINEL).all(), "a kernel wrote outside of a buffer"


@triton.jit
def _scales_of_amaxes(amaxes, stored, factors, FORMAT: tl.constexpr, COUNT: tl.constexpr):
    places = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    scale, factor = encode_scale(tl.load(amaxes + places), 1.0, FORMAT)
    tl.store(stored + places, scale)
    tl.store(factors + places, factor)


@pytest.mark.parametrize("format", [FP8_BLOCK, FP8_BLOCK_FP32], ids=lambda format: format.name)
def test_scales_of_fp8_blocks_are_the_references_for_every_amax(format, launches):
    """Subnormals included, whose quotients overflow, and scales whose inverse is subnormal."""
    count, programs = 1024, 32
    bits = torch.arange(count * programs).clamp(max=0x7F80).to(torch.int16)
    amaxes = bits.view(torch.bfloat16).float()
    stored, factors = torch.empty_like(amaxes), torch.empty_like(amaxes)
    tensors, constants = (amaxes, stored, factors), {"FORMAT": format.name, "COUNT": count}
    BoundKernel(_scales_of_amaxes, programs, *tensors, **constants, num_warps=4)()
    want = scales.encode_scale(amaxes, format)
    assert_bytes_equal(factors, want, what="factors")
    assert_bytes_equal(stored, want.reciprocal(), what="stored")


@triton.jit
def _int4_quotients(values, amaxes, found, COUNT: tl.constexpr):
    row = tl.program_id(0)
    places = row * COUNT + tl.arange(0, COUNT)[None, :]
    _, divisor = encode_row_scale(tl.load(amaxes + row + tl.arange(0, 1)), 1.0, "bf16", 7.0)
    tl.store(found + places, divide(tl.load(values + places), divisor[:, None]))


def test_quotients_of_int4_are_ieees_for_every_significand(launches):
    """Of bf16 values down to 2^-8 of the amax; scales that are clamped, and infinite ones."""
    count, binade = 1024, 0x3F80
    tops = torch.tensor([*range(binade, binade + 128), 0x2600, 0x7F7F, 0x7F80], dtype=torch.int32)
    bits = tops[:, None] - torch.arange(count, dtype=torch.int32)
    values = bits.to(torch.int16).view(torch.bfloat16).float()
    values[:, 1::2] *= -1
    found = torch.empty_like(values)
    BoundKernel(
        _int4_quotients,
        len(tops),
        values,
        values[:, 0].contiguous(),
        found,
        COUNT=count,
        num_warps=4,
    )()
    assert launches
    divisors = scales.encode_scales(INT4, values[:, :1], None)[1]
    want = torch.div(values, divisors)
    assert_values_equal(found, want, what="quotients")


@ONE_OF_EACH_PATH
def test_shards_that_meet_inside_of_blocks_are_the_references(format, launches):
    """Of weights cut in three, inside of block rows and experts; ranks exchange maxima alone."""
    masters = [values_of(shape, 9 + seed) for seed, shape in enumerate(SHAPES[format.name])]
    targets = [poisoned(format, tuple(master.shape)) for master in masters]
    tables = []
    for rank in range(3):
        entries = []
        for master, target in zip(masters, targets, strict=True):
            cuts = (master.numel() // 6 * 2, master.numel() // 3 * 2)
            start, end = (0, *cuts, master.numel())[rank : rank + 2]
            entries.append(
                TableEntry(
                    parameter="fc",
                    source=master.flatten()[start:end].clone(),
                    target=target,
                    start=start,
                    cuts=cuts,
                )
            )
        tables.append(MemberTable.build(entries))
        assert all_in_kernels(tables[-1])
        tables[-1].find_maxima.launch()
    largest = torch.stack([table.exchange for table in tables]).amax(0)
    for table in tables:
        table.exchange.copy_(largest)
        table.encode.launch()
    tables[0].finish.launch()
    assert launches
    assert_written(tables[0].entries, masters)


@pytest.mark.parametrize("format", [NVFP4, NVFP4_ROWS], ids=lambda format: format.name)
def test_columns_on_two_ranks_are_parts_of_the_whole(format, launches):
    """Whole blocks of each; experts that go on elsewhere share their amax."""
    shape, width = (2, 128, 256), 128
    partition = infer_partition(format, {"columns": {"tp": 2}}, shape=shape)
    master = values_of(shape, 30)
    whole = reference.quantize(master, format)
    tables = []
    for start in (0, width):
        part = master[:, :, start : start + width].contiguous()
        target = poisoned(format, tuple(part.shape))
        entry = TableEntry(parameter="fc1", source=part, target=target, shares_experts=True)
        tables.append(MemberTable.build([entry]))
        assert all_in_kernels(tables[-1])
        tables[-1].find_maxima.launch()
    largest = torch.stack([table.exchange for table in tables]).amax(0)
    for rank, table in enumerate(tables):
        table.exchange.copy_(largest)
        table.encode.launch()
        table.finish.launch()
        for name, buffer in table.entries[0].target.buffers().items():
            slices = partition.buffer(name).slices(partition.bounds({"tp": rank}))
            assert_bytes_equal(buffer, whole.buffers()[name][slices], what=f"part {rank} {name}")
    assert launches


L2 = (torch.bfloat16, torch.float32, False, False)
"""bf16 gradients and whole weights."""
ADAMW = (torch.float32, torch.bfloat16, True, True)
"""bf16 moments and shards."""
EVERY_TIME = {("mxfp8", L2), ("nvfp4", L2), *((name, ADAMW) for name in REPRESENTATIVE_FORMATS)}
RUNS = [
    pytest.param(
        *(format, *kind),
        id=f"{name}, {'AdamW' if kind is ADAMW else 'L2'}",
        marks=[] if (name, kind) in EVERY_TIME else [pytest.mark.extended],
    )
    for (name, format), kind in product(FORMATS.items(), (L2, ADAMW))
]


@pytest.mark.parametrize(("format", "gradients", "moments", "decoupled", "cut"), RUNS)
def test_steps_are_the_references(format, gradients, moments, decoupled, cut, launches):
    """Masters, moments, and weights that a step has encoded, quantized ones and dense ones.

    Quotients and roots, which a GPU approximates, are exact here: this shows what is computed and
    in which order, and not how the hardware divides.
    """
    shapes = SHAPES[format.name][:2]
    kinds = [(format, shape, torch.bfloat16) for shape in shapes]
    kinds += [(None, (1001,), torch.bfloat16), (None, (65,), torch.float32)]
    weights = []
    for seed, (one, shape, dtype) in enumerate(kinds):
        master = values_of(shape, 20 + seed)
        numel = master.numel()
        weights.append(
            Weight(
                master=master,
                format=one,
                dtype=dtype,
                bounds=(numel // 6 * 2, numel // 3 * 2) if cut else (),
                group=seed % 2,
                norm=seed // 2 % 2,
            )
        )
    run = Stepping(weights, gradients=gradients, moments=moments, decoupled=decoupled, clips=CLIPS)
    for table in run.tables:
        assert not table.remainder
    for seed in (100, 200):
        run.step(gradients_of(weights, seed))
        run.assert_equal_to_the_whole()
    assert launches


def test_ranks_share_a_last_block_row_that_is_lower_than_its_blocks(launches):
    """Of 200 rows the last 72, cut in the first, in the middle and in the last of them."""
    cuts = (128 * 40 + 5, 163 * 40 + 39, 199 * 40 + 1)
    weight = Weight(master=values_of((1, 200, 40), 4), format=FP8_BLOCK, bounds=cuts)
    run = Stepping([weight])
    assert not any(table.remainder for table in run.tables)
    run.step(gradients_of([weight], 7))
    run.assert_equal_to_the_whole()
    assert launches


def test_a_clip_factor_of_zero_is_a_step_without_gradients(launches):
    """In flat ranges and in whole blocks; below zero nothing moves."""
    weights = [
        Weight(master=values_of((1, 32, 64), 4), format=MXFP8),
        Weight(master=values_of((70,), 5)),
    ]
    assert_a_clip_of_zero_steps_without_gradients(weights)
    assert launches


def _amax_from(slot):
    """Return what is encoded of a cut expert whose largest magnitude lies in one of its slots."""
    master = wide_range_weights(1, 32, 64).clamp(-2, 2)
    target = QuantizedWeight.empty(NVFP4, (1, 32, 64))
    for buffer in target.buffers().values():
        buffer.view(torch.uint8).zero_()
    entry = TableEntry(parameter="fc1", source=master.flatten()[:1024], target=target, cuts=(1024,))
    table = MemberTable.build([entry])
    table.find_maxima.launch()
    (first,) = table.exchanges[0].experts.values()
    table.exchange[first + slot] = 300.0
    table.encode.launch()
    whole = master.clone()
    whole[0, 31, 63] = 300.0  # in a block of the other rank
    expected = reference.quantize(whole, NVFP4)
    return target, expected


def _assert_all_slots_count():
    for slot in (0, 31, 63):
        target, expected = _amax_from(slot)
        assert target.global_amax.tolist() == [300.0]
        half = slice(0, 16)  # the rows of this rank
        for name in ("rowwise_data", "rowwise_scale"):
            buffer, want = getattr(target, name), getattr(expected, name)
            rows = slice(0, buffer.shape[1] // 2) if name == "rowwise_scale" else half
            assert_bytes_equal(buffer[:, rows], want[:, rows], what=name)


def test_the_amax_of_a_cut_expert_is_the_largest_of_all_its_slots(launches):
    """Whichever rank and program has found it."""
    _assert_all_slots_count()
    assert launches


def test_the_reference_reads_all_slots_as_kernels_fill_them():
    _assert_all_slots_count()
