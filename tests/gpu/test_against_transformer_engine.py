"""Transformer Engine's cast of masters and ours give the same bytes, wherever a shard begins."""

from dataclasses import replace

import pytest
import torch

from benchmarks.te import cast as te_cast
from moe_optim.errors import PatchError
from moe_optim.formats import DIRECTIONS, FORMATS, FP8_BLOCK, FP8_BLOCK_FP32, MXFP8
from moe_optim.kernels.member_table import MemberTable, TableEntry
from moe_optim.weights.te.recipe import import_error, make_quantizer
from tests.support.inputs import poisoned, wide_range_weights, with_specials
from tests.support.number_formats.special_values import SPECIAL_CASES, special_weight
from tests.test_ops import rewrite_in_shards

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(import_error() is not None, reason="needs Transformer Engine"),
]
BLOCKS = (FP8_BLOCK, FP8_BLOCK_FP32)
EVERY_FORMAT = pytest.mark.parametrize("format", [MXFP8, *BLOCKS], ids=lambda format: format.name)
EVERY_BLOCK = pytest.mark.parametrize("format", BLOCKS, ids=lambda format: format.name)
SHAPES = ((256, 384), (128, 128), (1536, 256), (384, 2048))
EDGES = ((144, 272), (128, 400), (400, 128))  # FP8 blocks that are not whole; TE wants 16


FLUSHED_BY_TE = {
    "mxfp8: the bf16 above 448 * 2^-127",
    "fp8_block: just above 2^-134 becomes 2^-133",
    "fp8_block: 3 * 2^-134 is a tie and becomes 2^-132",
    "fp8_block: the smallest subnormal",
    "fp8_block: full of the negative smallest subnormal",
    "fp8_block: the largest subnormal",
    "fp8_block: the smallest normal",
    "fp8_block: 448 * 2^-127",
    "fp8_block: the bf16 below 448 * 2^-127",
    "fp8_block: 448 * 2^-128",
    "fp8_block: the bf16 above 448 * 2^-128",
}


@pytest.fixture(scope="module")
def group():
    with te_cast.group_of_one() as group:
        yield group


def entry_of(master, format, *, start=0, end=None, cuts=()):
    """Return an entry that owns elements ``start`` to ``end`` of a master [1, R, C]."""
    shape = tuple(master.shape)
    target = poisoned(format, shape, "cuda")
    source = master.cuda() if end is None else master.cuda().flatten()[start:end].clone()
    scales = {
        way: torch.zeros(
            (1, *format.storage_scale_shape(*shape[1:], way)),
            dtype=format.scale_dtype,
            device="cuda",
        )
        for way in DIRECTIONS
    }
    return TableEntry(
        parameter="fc",
        source=source,
        target=target,
        start=start,
        cuts=cuts,
        storage_scales=scales,
    )


def masters_of(format):
    shapes = SHAPES + (EDGES if format in BLOCKS else ())
    ordinary = [wide_range_weights(1, *shape, seed=i) for i, shape in enumerate(shapes)]
    return ordinary + [with_specials(master) for master in ordinary]


def special_masters(format, wanted=lambda name: True):
    """Return the named special weights of a format whose shapes Transformer Engine takes.

    FP8 blocks with fp32 scales have those with powers of two, too.
    """
    formats = {format.name} | ({"fp8_block"} if format is FP8_BLOCK_FP32 else set())
    cases = SPECIAL_CASES.items()
    masters = [
        special_weight(case) for name, case in cases if case.format in formats and wanted(name)
    ]
    return [master for master in masters if not any(size % 16 for size in master.shape[1:])]


def has_flushed_inverses(master):
    """Return whether a block's amax is below 448 * 2^-126: its inverse in fp32 is subnormal."""
    _, rows, cols = master.shape
    blocks = torch.nn.functional.pad(master, (0, -cols % 128, 0, -rows % 128))
    blocks = blocks.unflatten(2, (-1, 128)).unflatten(1, (-1, 128))
    amaxes = blocks.abs().nan_to_num(0.0, posinf=torch.inf).amax((2, 4))
    return bool(((amaxes > 0) & (amaxes < 448 * 2.0**-126)).any())


def assert_same_bytes(entries, group):
    table = MemberTable.build(entries)
    table.launch()
    table.finish.launch()
    cast = te_cast.MasterCast(entries, group)
    cast.quantize()
    cast.finish_gather()
    cast.check_bytes(derived=True)


@EVERY_FORMAT
def test_whole_weights_have_the_same_bytes(format, group):
    """Data and scales of both directions, padded scales included, ordinary and special values."""
    assert_same_bytes([entry_of(master, format) for master in masters_of(format)], group)


@EVERY_FORMAT
def test_the_named_special_values_have_the_same_bytes(format, group):
    masters = special_masters(format, lambda name: name not in FLUSHED_BY_TE)
    if format is FP8_BLOCK_FP32:
        masters = [master for master in masters if not has_flushed_inverses(master)]
    assert len(masters) > 50
    assert_same_bytes([entry_of(master, format) for master in masters], group)


@pytest.mark.parametrize("name", sorted(FLUSHED_BY_TE))
def test_blocks_that_tes_cast_of_masters_flushes_keep_their_bytes_here(name, group):
    """Bytes differ where TE's cast loses a block; the table of special values says which is right.

    TE turns the amaxes of masters into scales in a file compiled with ``--use_fast_math``: there a
    subnormal amax, product or inverse is zero, and so is what the block then decodes to (or, of
    MXFP8, saturates). All of it concerns weights below 448 * 2^-126, about 5e-36.
    """
    format = FORMATS[SPECIAL_CASES[name].format]
    (master,) = special_masters(format, name.__eq__)
    with pytest.raises(PatchError, match="expected the bytes of Transformer Engine"):
        assert_same_bytes([entry_of(master, format)], group)


def test_fp32_scales_whose_inverses_are_subnormal_are_flushed_by_tes_cast_of_masters(group):
    """By the same flag. Blocks of tiny weights read as zeros there, and keep their values here."""
    master = torch.full((1, 128, 128), 2.0**-118)
    assert has_flushed_inverses(master)
    with pytest.raises(PatchError, match="expected the bytes of Transformer Engine"):
        assert_same_bytes([entry_of(master, FP8_BLOCK_FP32)], group)


@EVERY_BLOCK
def test_fp8_blocks_have_the_bytes_of_tes_quantizer_down_to_subnormals(format):
    """The quantizer that TE fills primary weights with gives the same bytes, nothing excepted."""
    quantizer = make_quantizer(format)
    masters = special_masters(format) + masters_of(format)
    entries = [entry_of(master, format) for master in masters]
    table = MemberTable.build(entries)
    table.launch()
    table.finish.launch()
    te_cast.check_bytes(
        entries,
        [quantizer(master[0].bfloat16().cuda()) for master in masters],
        derived=True,
    )


@EVERY_FORMAT
@pytest.mark.parametrize("part", [0, 1, 2], ids=["first", "middle", "last"])
def test_shards_of_whole_block_rows_have_the_same_bytes_inside_of_the_shard(format, part, group):
    """Where TE starts at an offset, so do we; what it writes outside of a shard is not compared."""
    entries = []
    for master in masters_of(format):
        rows, cols = master.shape[1:]
        block_row = format.block_row_height * cols
        block_rows = rows // format.block_row_height
        if block_rows < 3:
            continue
        cuts = (block_row * (block_rows // 3), block_row * (2 * block_rows // 3))
        start, end = (0, *cuts, rows * cols)[part : part + 2]
        own = tuple(cut for cut in cuts if cut in (start, end))
        entries.append(entry_of(master, format, start=start, end=end, cuts=own))
    assert len(entries) >= 4
    table = MemberTable.build(entries)
    assert table.launches
    table.launch()
    cast = te_cast.MasterCast(entries, group)
    cast.quantize()
    cast.check_bytes(derived=False)


@EVERY_FORMAT
def test_shards_that_cut_blocks_have_the_bytes_of_whole_weights(format, group):
    """Ours are written by three ranks, cut anywhere; theirs at once."""
    tables, wholes = [[], [], []], []
    for master in masters_of(format):
        numel = master.numel()
        cuts = (numel // 7 * 2 + 1, numel // 5 * 3 + 3)
        target = None
        for rank, (start, end) in enumerate(zip((0, *cuts), (*cuts, numel), strict=True)):
            entry = entry_of(master, format, start=start, end=end, cuts=cuts)
            target = target or entry.target
            tables[rank].append(replace(entry, target=target, storage_scales={}))
        wholes.append(replace(entry_of(master, format), target=target))
    rewrite_in_shards([MemberTable.build(entries) for entries in tables])
    MemberTable.build(wholes).finish.launch()
    cast = te_cast.MasterCast(wholes, group)
    cast.quantize()
    cast.finish_gather()
    cast.check_bytes(derived=True)


def test_every_format_with_a_master_cast_is_compared():
    assert {FORMATS[name] for name in te_cast.FORMATS} == {MXFP8, *BLOCKS}
