"""The launches that cast masters to weights with one scale, without a GPU."""

import math

import pytest
import torch

from moe_optim.kernels import tensorwise
from moe_optim.kernels.member_table import plan_transposes
from moe_optim.kernels.tensorwise import ScaledWeight, TensorwiseTable
from moe_optim.kernels.tuning import FlatTile
from tests.support.bytes import assert_bytes_equal
from tests.support.inputs import SENTINEL, wide_range_weights, with_specials

TILE = FlatTile(numel=128, num_warps=1)
PART = 3 * TILE.numel
SIZES = (0, 1, 127, 128, 129, PART, PART + 1, 2 * PART + 2 * TILE.numel + 5)
LINE = 16


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(tensorwise, "TENSORWISE_PART", PART)
    monkeypatch.setattr(tensorwise, "TENSORWISE_TILE", TILE)


def weights_of(masters, *, beside=0):
    """Return weights whose codes begin some bytes beside a multiple of 16, and what is around."""
    weights, around = [], []
    for master in masters:
        memory = torch.full((master.numel() + 3 * LINE,), SENTINEL, dtype=torch.uint8)
        first = -memory.data_ptr() % LINE + beside
        before, data, after = memory.tensor_split([first, first + master.numel()])
        around += [before, after]
        weights.append(ScaledWeight(master=master, data=data, scale_inv=torch.zeros(1)))
    return weights, around


def cast(masters, *, backend="auto", beside=0, amaxes=None):
    """Return amaxes, scales, inverses and codes."""
    weights, around = weights_of(masters, beside=beside)
    built = TensorwiseTable.build(weights, backend=backend)
    assert bool(built.kernels) == (backend == "auto")
    built.amaxes.fill_(math.nan)
    built.find_amaxes.launch()
    found = built.amaxes.clone()
    if amaxes is not None:
        built.amaxes.copy_(amaxes)
    built.launch()
    assert (torch.cat(around) == SENTINEL).all()
    inverses = torch.cat([one.scale_inv for one in weights])
    return found, built.scales, inverses, torch.cat([one.data for one in weights])


def check(masters, what, **options):
    got = cast(masters, **options)
    want = cast(masters, backend="reference", **options)
    for name, ours, reference in zip(("amax", "scale", "inverse", "codes"), got, want, strict=True):
        assert_bytes_equal(ours, reference, what=f"{what}: {name}")


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("beside", [0, 1], ids=["aligned", "a byte beside"])
def test_masters_of_many_sizes(launches, beside):
    """From nothing to several parts, all in one table; wide values, and special ones among them."""
    masters = [with_specials(wide_range_weights(size, seed=size), every=61) for size in SIZES]
    masters += [wide_range_weights(size, seed=size) for size in SIZES]
    check(masters, "sizes", beside=beside)
    assert set(launches) == {
        "part_amax_kernel",
        "weight_amax_kernel",
        "scale_kernel",
        "cast_kernel",
    }


@pytest.mark.usefixtures("small_tiles")
def test_the_amax_of_other_ranks_counts(launches):
    """It scales what is owned here, and a weight of which nothing is owned gets its inverse."""
    masters = [wide_range_weights(300, seed=1), torch.empty(0)]
    check(masters, "amaxes", amaxes=torch.tensor([2.0**41, 3.0]))


def test_special_amaxes(launches):
    """In tiles as they are launched: zero, Inf, and scales that overflow or have no inverse."""
    values = (0.0, math.inf, math.nan, 2.0**-133, 1.0e-36, 448.0, 3.0e38, 2.0**-126)
    check([torch.full((9,), value) for value in values], "special")


@pytest.mark.parametrize("beside", [0, 1], ids=["whole words", "a byte beside"])
def test_transposes_of_many_shapes_at_once(launches, beside):
    """Of weights one behind the other, as they lie in a bucket."""
    shapes = ((16, 64), (4, 4), (64, 48), (20, 12))
    sizes = [rows * cols for rows, cols in shapes]
    memory = torch.randint(0, 256, (sum(sizes) + beside,), dtype=torch.uint8)[beside:]
    sources = [one.view(shape) for one, shape in zip(memory.split(sizes), shapes, strict=True)]
    copies = [torch.full(shape[::-1], SENTINEL, dtype=torch.uint8) for shape in shapes]
    built = plan_transposes(list(zip(sources, copies, strict=True)))
    assert built.kernels[0].constants["PACK"] == (1 if beside else 4)
    built.launch()
    for source, copy in zip(sources, copies, strict=True):
        assert_bytes_equal(copy, source.t(), what=f"{list(source.shape)}")
    assert launches == ["finish_gather_kernel"]


def test_masters_that_have_moved_are_noticed():
    weights, _ = weights_of([torch.full((9,), 3.0)])
    built = TensorwiseTable.build(weights)
    assert not built.has_moved
    weights[0].master.data = torch.full((9,), 7.0)
    assert built.has_moved and built.find_amaxes.has_moved
