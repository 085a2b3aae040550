"""The squared norm of gradients, one number for all cuts of them, and how many are zero."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_optim.kernels import norm
from moe_optim.kernels.norm import NormInput, NormTable
from moe_optim.kernels.tuning import NORM, NormTile
from tests.support.bytes import assert_bytes_equal, assert_values_equal
from tests.support.inputs import e4m3_exact_integers, placed, wide_range_weights

DTYPES = (torch.float32, torch.bfloat16)
LINES = 128
SMALL = NormTile(numel=128, num_tiles=3, num_warps=1)
"""For as many tiles and parts as are soon run; those of a launch run on wide values."""


place = partial(placed, line=LINES)


def check(gradients, what, *, exact=True, **options):
    """Compare a launch with the reference, twice: the second time on other values."""
    launched = NormTable.build(gradients, count_zeros=True, **options)
    wanted = NormTable.build(gradients, count_zeros=True, backend="reference", **options)
    assert launched.kernels and not wanted.kernels
    for _ in range(2):
        launched.squares.fill_(-1)
        launched.zeros.fill_(-1)
        launched.launch()
        wanted.launch()
        got, want = launched.squares, wanted.squares
        if not exact:  # sums in another order differ beyond what fp32 shows
            got, want = got.float(), want.float()
        assert_values_equal(got, want, what=what)
        assert_bytes_equal(launched.zeros, wanted.zeros, what=f"zeros {what}")
        for one in gradients:
            one.values.mul_(2).abs_()


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(norm, "NORM", dict.fromkeys(NORM, SMALL))


def whole_numbers(numel, seed):
    return e4m3_exact_integers(1, numel, 1, seed=seed).view(-1)


@pytest.mark.usefixtures("small_tiles")
def test_sums_of_tensors_of_many_sizes(launches):
    """Tensors of many sizes, groups and dtypes in one table, from one element to several parts."""
    gradients = []
    for dtype in DTYPES:
        tile, part = SMALL.numel, SMALL.numel * SMALL.num_tiles
        sizes = (0, 1, 7, tile - 1, tile, tile + 1, part, part + 1, 2 * part + 3 * tile + 5)
        for seed, size in enumerate(sizes):
            values = place(whole_numbers(size, seed), dtype, 3 * seed)
            gradients.append(NormInput(values, (seed * 5) % 4))
    check(gradients, "sizes", num_groups=5)


@pytest.mark.usefixtures("small_tiles")
def test_sums_from_anywhere_in_a_cache_line(launches):
    """Tensors that begin all over a cache line, and end in their first tile or in the second."""
    for dtype in DTYPES:
        gradients = []
        for index, offset in enumerate(range(0, LINES // dtype.itemsize, 3)):
            length = (40, SMALL.numel - 15)[index % 2]
            values = place(whole_numbers(length, index), dtype, offset)
            gradients.append(NormInput(values, index))
        check(gradients, f"offsets {dtype}")


def test_sums_of_wide_values(launches):
    """Values of 80 powers of two, and zeros of both signs, in tiles as they are launched."""
    for dtype in DTYPES:
        values = place(wide_range_weights(90_000, seed=1), dtype, 1)
        check([NormInput(values[:20_001]), NormInput(values[20_001:])], f"{dtype}", exact=False)


@pytest.mark.usefixtures("small_tiles")
def test_special_values_show_in_their_group(launches):
    """NaN and Inf at the edges of parts; subnormals do not vanish."""
    for dtype in DTYPES:
        part = SMALL.numel * SMALL.num_tiles
        for where in (0, part - 2, -1):
            gradients = []
            for group, value in enumerate((1.0, math.nan, math.inf, -math.inf, -0.0, 2.0**-130)):
                values = place(torch.ones(part + 9), dtype, 1)
                values[where] = value
                gradients.append(NormInput(values, group))
            check(gradients, f"special {dtype} {where}", exact=False)


def test_what_is_not_there(launches):
    """Empty tables; no zeros are counted unasked."""
    check([], "nothing", num_groups=2)
    check([NormInput(torch.zeros(0), 1)], "empty")
    table = NormTable.build([NormInput(torch.ones(9))])
    table.launch()
    assert (table.squares.tolist(), table.zeros.tolist()) == ([9], [0])


# In plain torch

NUMEL = 1000

pieces = st.lists(
    st.tuples(st.integers(0, NUMEL), st.integers(0, 2), st.sampled_from(DTYPES)),
    min_size=1,
    max_size=8,
)


def summed(*gradients, **options):
    table = NormTable.build(gradients, **options)
    table.launch()
    return table


def squares_of(values):
    return values.double().square().sum()


@given(pieces, st.integers(0, 3))
def test_every_cut_gives_each_group_the_sum_of_its_elements(pieces, seed):
    """As fp32: empty tensors, views that begin anywhere, and both dtypes in one table included."""
    values = wide_range_weights(NUMEL, seed=seed).bfloat16().float()  # the same in both dtypes
    cuts = sorted(place for place, _, _ in pieces[1:])
    parts = values.tensor_split(cuts)
    kinds = [(group, dtype) for _, group, dtype in pieces]
    table = summed(
        *(NormInput(part.to(d), g) for part, (g, d) in zip(parts, kinds, strict=True)),
        num_groups=3,
        count_zeros=True,
    )
    for group, got in enumerate(table.squares):
        owned = [part for part, (g, _) in zip(parts, kinds, strict=True) if g == group]
        want = squares_of(torch.cat([values[:0], *owned]))
        assert_bytes_equal(got.float(), want.float(), what=f"group {group}")
    assert table.zeros.item() == (values == 0).sum()


def test_another_step_starts_from_zero():
    """Whatever became of the results of the last one, which ranks add up in place."""
    values = torch.zeros(6)
    table = summed(NormInput(values[:3]), NormInput(values[3:], 1), count_zeros=True)
    table.squares.fill_(7)
    values[:4] = 2.0
    table.launch()
    assert table.squares.tolist() == [12, 4]
    assert table.zeros.tolist() == [2]


@pytest.mark.parametrize("moved", range(3))
def test_a_table_watches_gradients_of_every_piece_of_memory(moved):
    values = [torch.ones(8) for _ in range(3)]
    table = NormTable.build([NormInput(one) for one in values])
    assert not table.has_moved
    values[moved].data = torch.ones(8)
    assert table.has_moved
