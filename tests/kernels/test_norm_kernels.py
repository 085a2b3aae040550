"""The launch that finds the norm of gradients, without a GPU."""

import math

import pytest
import torch

from moe_optim import ops
from moe_optim.kernels.norm import Gradients, NormTable, launch, table
from moe_optim.kernels.tuning import NORM, NormTile
from tests.support.bytes import assert_bytes_equal, assert_values_equal
from tests.support.inputs import e4m3_exact_integers, wide_range_weights

DTYPES = (torch.float32, torch.bfloat16)
LINES = 128
SMALL = NormTile(numel=128, num_tiles=3, num_warps=1)
"""For as many tiles and parts as are soon run; those of a launch run on wide values."""


def place(values, dtype, offset):
    """Return a copy that begins some elements behind a cache line, with NaN around it."""
    numel = values.numel()
    memory = torch.full((numel + offset + 2 * LINES,), math.nan, dtype=dtype)
    first = -memory.data_ptr() % LINES // dtype.itemsize + offset
    return memory[first : first + numel].copy_(values)


def check(gradients, what, *, exact=True, **options):
    """Compare a launch with the reference, twice: the second time on other values."""
    launched = NormTable.build(gradients, count_zeros=True, **options)
    wanted = NormTable.build(gradients, count_zeros=True, backend="reference", **options)
    assert launched.has_kernels and not wanted.has_kernels
    for _ in range(2):
        launched.squares.fill_(-1)
        launched.zeros.fill_(-1)
        ops.sum_squares(launched)
        ops.sum_squares(wanted)
        got, want = launched.squares, wanted.squares
        if not exact:  # sums in another order differ beyond what fp32 shows
            got, want = got.float(), want.float()
        assert_values_equal(got, want, what=what)
        assert_bytes_equal(launched.zeros, wanted.zeros, what=f"zeros {what}")
        for one in gradients:
            one.values.mul_(2).abs_()


@pytest.fixture
def small_tiles(monkeypatch):
    for module in (table, launch):
        monkeypatch.setattr(module, "NORM", dict.fromkeys(NORM, SMALL))


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
            gradients.append(Gradients(values, (seed * 5) % 4))
    check(gradients, "sizes", num_groups=5)


@pytest.mark.usefixtures("small_tiles")
def test_sums_from_anywhere_in_a_cache_line(launches):
    """Tensors that begin all over a cache line, and end in their first tile or in the second."""
    for dtype in DTYPES:
        gradients = []
        for index, offset in enumerate(range(0, LINES // dtype.itemsize, 3)):
            length = (40, SMALL.numel - 15)[index % 2]
            values = place(whole_numbers(length, index), dtype, offset)
            gradients.append(Gradients(values, index))
        check(gradients, f"offsets {dtype}")


def test_sums_of_wide_values(launches):
    """Values of 80 powers of two, and zeros of both signs, in tiles as they are launched."""
    for dtype in DTYPES:
        values = place(wide_range_weights(90_000, seed=1), dtype, 1)
        check([Gradients(values[:20_001]), Gradients(values[20_001:])], f"{dtype}", exact=False)


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
                gradients.append(Gradients(values, group))
            check(gradients, f"special {dtype} {where}", exact=False)


def test_what_is_not_there(launches):
    """Empty tables; no zeros are counted unasked; gradients that have moved."""
    check([], "nothing", num_groups=2)
    check([Gradients(torch.zeros(0), 1)], "empty")
    values = torch.zeros(9)
    moved = NormTable.build([Gradients(values)])
    ops.sum_squares(moved)
    assert moved.zeros.tolist() == [0]
    values.data = torch.full((9,), 2.0)
    ops.sum_squares(moved)
    assert moved.squares.tolist() == [36]
