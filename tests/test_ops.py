"""One launch writes every storage of a table, with the bytes of one by one, and tidies up."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_optim import ops, reference
from moe_optim.errors import LayoutError
from moe_optim.formats import FORMATS, FP8_BLOCK, MXFP8, MXFP8_2D, NVFP4
from moe_optim.kernels.member_table import MemberTable, TableEntry
from tests.support.bytes import assert_bytes_equal
from tests.support.inputs import poisoned, wide_range_weights

MIXED = (  # parameters of one launch
    (MXFP8, (2, 64, 96)),
    (NVFP4, (3, 32, 16)),
    (MXFP8, (1, 32, 32)),
    (FP8_BLOCK, (2, 130, 40)),
    (MXFP8_2D, (4, 32, 64)),
)
GAP = 24
"""Elements between the sources of two parameters, and before and after them all."""


def lay_out(parameters, dtype=torch.bfloat16, seed=0):
    """Return flat memory full of values and a table entry for each parameter within it."""
    numels = [shape[0] * shape[1] * shape[2] for _, shape in parameters]
    memory = wide_range_weights(sum(numels) + GAP * (len(parameters) + 1), seed=seed).to(dtype)
    entries, start = [], GAP
    for index, ((format, shape), numel) in enumerate(zip(parameters, numels, strict=True)):
        source = memory[start : start + numel].view(shape)
        entries.append(
            TableEntry(parameter=f"fc{index}", source=source, target=poisoned(format, shape))
        )
        start += numel + GAP
    return memory, entries


def expected_planes(entries):
    return [reference.quantize(entry.source, entry.target.format).planes() for entry in entries]


def assert_written(entries, expected):
    for entry, planes in zip(entries, expected, strict=True):
        for name, plane in entry.target.planes().items():
            assert_bytes_equal(plane, planes[name], what=f"{entry.parameter} {name}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_mixed_table_equals_one_by_one(dtype, backend):
    """Shapes and formats share a launch; every byte of every plane is the oracle's."""
    _, entries = lay_out(MIXED, dtype)
    expected = expected_planes(entries)
    ops.requantize(MemberTable.build(entries), backend)
    assert_written(entries, expected)


@settings(max_examples=25, deadline=None)
@given(
    parameters=st.lists(
        st.tuples(
            st.sampled_from(list(FORMATS.values())),
            st.tuples(
                st.integers(0, 3), st.sampled_from([0, 32, 64]), st.sampled_from([32, 96, 128])
            ),
        ),
        max_size=4,
    ),
    seed=st.integers(0, 2**31),
)
def test_any_table_equals_one_by_one_and_zeroes_its_memory(parameters, seed):
    memory, entries = lay_out(parameters, seed=seed)
    expected = expected_planes(entries)
    ops.requantize(MemberTable.build(entries, consumed=memory))
    assert_written(entries, expected)
    assert_bytes_equal(memory, torch.zeros_like(memory), what="consumed memory")


def test_consumed_memory_ends_as_positive_zeros_gaps_included():
    """NaN, infinities and negative zeros too: what follows may accumulate gradients there."""
    memory, entries = lay_out(MIXED)
    memory[:4] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])
    ops.requantize(MemberTable.build(entries, consumed=memory))
    assert not memory.view(torch.uint8).any()


def test_without_consumed_memory_sources_are_left_alone():
    memory, entries = lay_out(MIXED)
    before = memory.clone()
    ops.requantize(MemberTable.build(entries))
    assert_bytes_equal(memory, before)


def test_one_table_serves_every_step():
    """It holds views: new values in the same memory are found by the next launch."""
    memory, entries = lay_out(MIXED)
    table = MemberTable.build(entries, consumed=memory)
    for step in range(3):
        memory.copy_(wide_range_weights(memory.numel(), seed=step))
        expected = expected_planes(entries)
        ops.requantize(table)
        assert_written(entries, expected)


def test_an_empty_table_still_zeroes_what_is_consumed():
    """A rank may own no expert of a bucket, and its padding is gathered like any other."""
    memory = torch.ones(8, dtype=torch.bfloat16)
    ops.requantize(MemberTable.build([], consumed=memory))
    assert not memory.any()
    ops.requantize(MemberTable.build([]))


def test_members_are_experts():
    _, entries = lay_out(MIXED)
    assert MemberTable.build(entries).num_members == 2 + 3 + 1 + 2 + 4
    assert MemberTable.build([]).num_members == 0


def test_a_table_is_frozen():
    table = MemberTable.build(lay_out(MIXED)[1])
    assert isinstance(table.entries, tuple)
    with pytest.raises(AttributeError):
        table.consumed = None


BAD_SOURCES = {  # for a target [2, 64, 32]
    "one expert too few": (torch.zeros(1, 64, 32), r"shape \[2, 64, 32\], got \[1, 64, 32\]"),
    "flat": (torch.zeros(2 * 64 * 32), r"shape \[2, 64, 32\], got \[4096\]"),
    "transposed shape": (torch.zeros(2, 32, 64), r"shape \[2, 64, 32\], got \[2, 32, 64\]"),
    "fp16": (torch.zeros(2, 64, 32).half(), r"fp32 or bf16 source, got torch\.float16"),
    "fp64": (torch.zeros(2, 64, 32).double(), r"fp32 or bf16 source, got torch\.float64"),
    "bytes": (torch.zeros(2, 64, 32, dtype=torch.uint8), r"got torch\.uint8"),
    "strided": (torch.zeros(2, 32, 64).transpose(1, 2), r"contiguous .* strides \[2048, 1, 64\]"),
    "on another device": (torch.zeros(2, 64, 32, device="meta"), r"one device, got meta and cpu"),
}


@pytest.mark.parametrize(("source", "message"), BAD_SOURCES.values(), ids=BAD_SOURCES.keys())
def test_a_bad_source_is_refused_by_name_when_the_table_is_built(source, message):
    good = lay_out(MIXED)[1]
    bad = TableEntry(
        parameter="layers.1.fc2.weight", source=source, target=poisoned(MXFP8, (2, 64, 32))
    )
    with pytest.raises(LayoutError, match=rf"^layers\.1\.fc2\.weight: expected .*{message}"):
        MemberTable.build([*good, bad])
