"""Weights with per-tensor scaling on a GPU: bytes of the reference, and of Transformer Engine."""

import math

import pytest
import torch

from benchmarks.te.cast import group_of_one
from moe_optim.kernels.tensorwise import ScaledWeight, TensorwiseTable
from moe_optim.weights.te.recipe import import_error
from moe_optim.weights.te.tensorwise import TensorwiseCast, Transposes, can_cast
from tests.support.bytes import assert_bytes_equal
from tests.support.inputs import SENTINEL, normal_weights, wide_range_weights, with_specials
from tests.support.steps.launches import assert_neither_allocates_nor_waits

pytestmark = pytest.mark.gpu

NUMELS = (0, 1, 15, 4096, 65_537, 1_000_003, 3_000_000)
SHAPES = ((256, 384), (16, 16), (1536, 2048), (144, 272))
KINDS = {
    "normal": normal_weights,
    "wide": wide_range_weights,
    "special": lambda *shape, seed: with_specials(wide_range_weights(*shape, seed=seed)),
}
AMAXES = (0.0, math.inf, 2.0**-126, 1.0e-36, 447.0 * 2.0**-126, 1.0e-30, 1.0, 3.0, 448.0, 3.0e38)
"""Of weights in which every element has this magnitude."""
FLUSHED_BY_TE = (2.0**-133, 2.0**-127)
"""Subnormal: TE's scale of such an amax is 1, since the file that makes it is compiled with
``--use_fast_math``. The scales of its quantizer, and ours, are not."""

needs_te = pytest.mark.skipif(import_error() is not None, reason="needs Transformer Engine")


def lay_out(seed, first=0, backend="auto"):
    """Return a table of masters one behind the other, as are their codes, and these."""
    masters = with_specials(wide_range_weights(sum(NUMELS) + first, seed=seed)).cuda()[first:]
    codes = torch.full((sum(NUMELS) + first,), SENTINEL, dtype=torch.uint8, device="cuda")[first:]
    weights = [
        ScaledWeight(master=master, data=data, scale_inv=torch.zeros(1, device="cuda"))
        for master, data in zip(masters.split(NUMELS), codes.split(NUMELS), strict=True)
    ]
    return TensorwiseTable.build(weights, backend=backend), masters, codes


def cast(table):
    table.find_amaxes.launch()
    table.launch()


def assert_cast_alike(got, want, what=""):
    assert_bytes_equal(got.amaxes, want.amaxes, what=f"amaxes {what}")
    assert_bytes_equal(got.scales, want.scales, what=f"scales {what}")
    for index, (ours, theirs) in enumerate(zip(got.weights, want.weights, strict=True)):
        assert_bytes_equal(ours.data, theirs.data, what=f"codes {index} {what}")
        assert_bytes_equal(ours.scale_inv, theirs.scale_inv, what=f"inverse {index} {what}")


@pytest.mark.parametrize("first", [0, 1, 4])
def test_bytes_are_the_references(first):
    """At any alignment; and of new values later."""
    table, masters, _ = lay_out(0, first)
    assert table.kernels
    for seed in (0, 1):
        want, values, _ = lay_out(seed, first, backend="reference")
        masters.copy_(values)
        table.amaxes.fill_(math.nan)
        cast(table)
        cast(want)
        assert_cast_alike(table, want, f"from {first}, seed {seed}")


def test_a_captured_graph_casts_new_values():
    """And a launch allocates nothing, and does not wait."""
    table, masters, _ = lay_out(0)
    assert_neither_allocates_nor_waits(lambda: cast(table))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cast(table)
    want, values, _ = lay_out(1, backend="reference")
    masters.copy_(values)
    graph.replay()
    cast(want)
    assert_cast_alike(table, want)


@pytest.fixture(scope="module")
def group():
    with group_of_one() as group:
        yield group


def make_weights(shapes):
    """Return weights of Transformer Engine in its recipe of current scaling, bytes poisoned."""
    from transformer_engine.pytorch import DType, Float8CurrentScalingQuantizer

    quantizer = Float8CurrentScalingQuantizer(DType.kFloat8E4M3, device=torch.device("cuda"))
    weights = [quantizer.make_empty(s, dtype=torch.bfloat16, device="cuda") for s in shapes]
    for weight in weights:
        weight._data.fill_(SENTINEL)
        weight._scale_inv.fill_(math.nan)
    assert can_cast(weights)
    return weights


def cast_both(shapes, masters, starts, group):
    """Return weights that we have cast, and those that Transformer Engine has."""
    from transformer_engine.pytorch.tensor import utils

    ours, theirs = make_weights(shapes), make_weights(shapes)
    TensorwiseCast(ours, masters, starts).run(group)
    utils.quantize_master_weights(
        theirs, masters, starts, group, manual_post_all_gather_processing=True
    )
    return ours, theirs


def assert_same_weights(ours, theirs, what):
    for index, (got, want) in enumerate(zip(ours, theirs, strict=True)):
        assert_bytes_equal(got._scale_inv, want._scale_inv, what=f"{what} {index}, inverse")
        assert_bytes_equal(got._data, want._data, what=f"{what} {index}")


@needs_te
@pytest.mark.parametrize("kind", KINDS)
def test_whole_weights_have_tes_bytes(kind, group):
    masters = [KINDS[kind](*shape, seed=i).cuda().view(-1) for i, shape in enumerate(SHAPES)]
    ours, theirs = cast_both(SHAPES, masters, [0] * len(SHAPES), group)
    assert_same_weights(ours, theirs, kind)


@needs_te
@pytest.mark.parametrize("part", range(3))
def test_shards_have_tes_bytes(part, group):
    """Thirds that begin anywhere, nothing of some; what is not owned is not written."""
    masters, starts = [], []
    for index, shape in enumerate(SHAPES):
        numel = shape[0] * shape[1]
        start, end = numel * part // 3, numel * (part + 1) // 3
        is_owned = index != part
        masters.append(wide_range_weights(end - start, seed=index).cuda() if is_owned else None)
        starts.append(start if is_owned else None)
    ours, theirs = cast_both(SHAPES, masters, starts, group)
    assert_same_weights(ours, theirs, f"third {part}")


@needs_te
def test_special_amaxes_have_tes_bytes(group):
    masters = [torch.full((256,), amax, device="cuda") for amax in AMAXES]
    shapes = [(16, 16)] * len(masters)
    ours, theirs = cast_both(shapes, masters, [0] * len(masters), group)
    for amax, got, want in zip(AMAXES, ours, theirs, strict=True):
        assert_same_weights([got], [want], f"amax {amax}")


@needs_te
@pytest.mark.parametrize("amax", FLUSHED_BY_TE)
def test_amaxes_that_tes_cast_of_masters_flushes_keep_their_scale_here(amax, group):
    """Ours is that of Transformer Engine's own quantizer."""
    from transformer_engine.pytorch import DType, Float8CurrentScalingQuantizer

    master = torch.full((256,), amax, device="cuda")
    (ours,), (theirs,) = cast_both([(16, 16)], [master], [0], group)
    quantizer = Float8CurrentScalingQuantizer(DType.kFloat8E4M3, device=torch.device("cuda"))
    want = quantizer(master.view(16, 16).bfloat16())
    assert_same_weights([ours], [want], f"amax {amax}")
    assert not torch.equal(ours._scale_inv, theirs._scale_inv)


def fill(weights, seed):
    generator = torch.Generator().manual_seed(seed)
    for weight in weights:
        codes = torch.randint(0, 256, weight.shape, generator=generator, dtype=torch.uint8)
        weight._data.copy_(codes)


@needs_te
def test_transposes_have_tes_bytes():
    """Of new codes, too; and whoever gives a weight other memory, or says that its transpose is
    old, is noticed."""
    weights, theirs = make_weights(SHAPES), make_weights(SHAPES)
    for weight in (*weights, *theirs):
        weight._create_transpose()
    transposes = Transposes.of(weights)
    for seed in (1, 2):
        fill(weights, seed)
        fill(theirs, seed)
        transposes.renew()
        for ours, want in zip(weights, theirs, strict=True):
            want._create_transpose()
            assert_bytes_equal(ours._transpose, want._transpose)
    assert not transposes.have_moved
    weights[1]._transpose_invalid = True
    assert transposes.have_moved and Transposes.of(weights) is None
    weights[1]._transpose_invalid = False
    weights[2]._data = weights[2]._data.clone()
    assert transposes.have_moved and Transposes.of(weights) is not None
    weights[0]._transpose = None
    assert transposes.have_moved and Transposes.of(weights) is None


@needs_te
def test_a_captured_graph_transposes_new_codes():
    """Also when whoever captured it has dropped what it asked for; a capture plans nothing."""
    weights = make_weights(SHAPES)
    for weight in weights:
        weight._create_transpose()
    transposes = Transposes.of(weights)
    transposes.renew()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert Transposes.of(weights) is None
        transposes.renew()
    del transposes
    fill(weights, 3)
    graph.replay()
    for weight in weights:
        assert_bytes_equal(weight._transpose, weight._data.t().contiguous())
