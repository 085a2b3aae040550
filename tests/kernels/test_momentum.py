"""Momentum, packing and unpacking around the iteration of Muon: bits that no layout changes."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_optim.kernels import momentum
from moe_optim.kernels.fields import HYPER_FIELDS
from moe_optim.kernels.matrices import MatrixShard, split_rows
from moe_optim.kernels.momentum import Momentum
from moe_optim.kernels.tuning import FlatTile
from tests.support.bytes import assert_bytes_equal, assert_values_equal
from tests.support.inputs import normal_weights, placed, wide_range_weights, with_specials
from tests.support.matrix_rows import gate_and_up, indices_of, whole_rows

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
TILE, PART, LANES = 128, 256, 4
DECAYS = (0.95, 0.3, 0.5)
"""Momenta on both sides of a half, from which lerp begins at the other end."""

SMALL = {
    "MOMENTUM_TILE": FlatTile(numel=TILE, num_warps=1),
    "MOMENTUM_PART": PART,
    "MOMENTUM_LANES": LANES,
    "PACK_TILE": FlatTile(numel=TILE, num_warps=1),
    "PACK_PART": PART,
    "_CHUNK": 1000,
}


@pytest.fixture
def small_tiles(monkeypatch):
    """Matrices of several parts and tiles at sizes that are soon run."""
    for name, value in SMALL.items():
        monkeypatch.setattr(momentum, name, value)


BOTH = pytest.mark.parametrize("nesterov", [True, False], ids=["nesterov", "plain"])


def hyper_of(*decays):
    rows = [[decay, 1 - decay, *[math.nan] * (HYPER_FIELDS - 2)] for decay in decays]
    return torch.tensor(rows, dtype=torch.float32)


def shard_of(rows, shape, dtype=FP32, *, group=0, norm=0, offset=0, seed=0, draw=normal_weights):
    gradient, momentum = (draw(*shape, seed=2 * seed + one) for one in range(2))
    return MatrixShard(
        parameter="fc1",
        gradient=placed(gradient.view(-1), dtype, offset),
        momentum=placed(momentum.view(-1), FP32, offset),
        shape=shape,
        rows=rows,
        group=group,
        norm=norm,
    )


def shards_of(draw=normal_weights):
    """Whole weights, halves, blocks shorter and longer than a part, at even and odd addresses.

    No group has the number of its clip factor.
    """
    shards = [
        (whole_rows(5), (3, 5, 208), FP32, 0, 0),
        (whole_rows(4), (2, 4, 64), BF16, 1, 0),
        (gate_and_up(16, 2), (2, 16, 48), BF16, 1, 0),
        (gate_and_up(32, 8), (1, 32, 64), FP32, 2, 0),
        (gate_and_up(12, None), (2, 12, 81), FP32, 0, 1),
        (gate_and_up(36, 9), (1, 36, 65), BF16, 1, 0),
        (split_rows(18, (4, 1, 1)), (1, 18, 72), BF16, 2, 0),
        (split_rows(12, (2, 1, 1)), (2, 12, 35), FP32, 1, 3),
        (split_rows(12, (2, 1, 1)), (2, 12, 37), FP32, 2, 0),
        (whole_rows(1), (1, 1, 1), FP32, 0, 0),
    ]
    return [
        shard_of(
            rows,
            shape,
            dtype,
            group=group,
            norm=(group + 1) % 3,
            offset=offset,
            seed=seed,
            draw=draw,
        )
        for seed, (rows, shape, dtype, group, offset) in enumerate(shards)
    ]


def direction_of(shard, hyper, clips, nesterov):
    """Update the momentum of a shard as emerging-optimizers does, and return the direction."""
    clip, decay = clips[shard.norm], hyper[shard.group, 0].item()
    if clip < 0:
        return shard.momentum
    gradient = shard.gradient.float() * clip
    shard.momentum.lerp_(gradient, hyper[shard.group, 1].item())
    return gradient.lerp(shard.momentum, decay) if nesterov else shard.momentum


def matrices_of(shard, values):
    """Yield all matrices of a shard in the order of squares."""
    for weight in values.view(shard.shape):
        for rows in shard.rows:
            yield weight[indices_of(rows)]


def sum_in_order(values):
    """Return the sum of squares in fp64, in an order that is written down addition by addition."""
    squares = [float(value) ** 2 for value in values.view(-1)]
    sums = [add(squares[first : first + PART], TILE) for first in range(0, len(squares), PART)]
    return add(sums, LANES)


def add(values, lanes):
    totals = [0.0] * lanes
    for place, value in enumerate(values):
        totals[place % lanes] += value
    while len(totals) > 1:
        totals = [one + other for one, other in zip(totals[::2], totals[1::2], strict=True)]
    return totals[0]


def packed_of(plan, shard, rows, dtype):
    """Pack all weights of a shard, and unpack them again into weights that are full of -1."""
    piece = plan.piece(shard, rows=rows)
    height = piece.shard.rows[rows or 0].rows
    packed = torch.full((piece.num_matrices, height, piece.shard.shape[2]), math.nan, dtype=dtype)
    plan.plan_pack([piece], packed).launch()
    weights = torch.full((piece.numel,), -1.0, dtype=dtype)
    plan.plan_unpack(packed, [piece], weights).launch()
    return packed, weights


@BOTH
@pytest.mark.usefixtures("small_tiles")
def test_a_launch_updates_momentum_as_torchs_lerp_does(nesterov):
    """And sums squares in the order that is written down; values are those of the momentum."""
    hyper, clips = hyper_of(*DECAYS), torch.tensor([0.7, 1.0, 1.5])
    shards, copies = shards_of(), shards_of()
    plan = Momentum.build(shards, hyper, clips, nesterov=nesterov)
    for _ in range(2):
        plan.launch()
        want = []
        for shard, copy in zip(shards, copies, strict=True):
            direction = direction_of(copy, hyper, clips, nesterov)
            want += [sum_in_order(matrix) for matrix in matrices_of(copy, direction)]
            assert_bytes_equal(shard.momentum, copy.momentum)
        assert_bytes_equal(plan.squares, torch.tensor(want, dtype=torch.float64))


@BOTH
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_a_batch_holds_directions_divided_by_their_norms(dtype, nesterov):
    """Matrix by matrix, and unpacked they lie in the rows that they came from."""
    hyper, clips = hyper_of(*DECAYS), torch.tensor([0.7, 1.0, 1.5])
    shards, copies = shards_of(), shards_of()
    plan = Momentum.build(shards, hyper, clips, nesterov=nesterov)
    plan.launch()
    for index, copy in enumerate(copies):
        direction = direction_of(copy, hyper, clips, nesterov)
        for number, rows in enumerate(copy.rows):
            squares = plan.squares[plan.starts[index] + number :: len(copy.rows)]
            norms = squares[: copy.shape[0]].sqrt().float()
            got, weights = packed_of(plan, index, number, dtype)
            weight_order = torch.full(copy.shape, -1.0, dtype=dtype)
            for place, norm in enumerate(norms):
                matrix = direction.view(copy.shape)[place, indices_of(rows)]
                want = (matrix / norm.clamp(min=1e-7)).to(dtype)
                assert_bytes_equal(got[place], want, what=f"{index} {number} {place}")
                weight_order[place, indices_of(rows)] = want
            assert_bytes_equal(weights, weight_order.view(-1))


def check_launches(draw, hyper, clips, nesterov):
    """Compare kernels with plain torch, bit by bit."""
    shards, copies = shards_of(draw), shards_of(draw)
    launched = Momentum.build(shards, hyper, clips, nesterov=nesterov)
    wanted = Momentum.build(copies, hyper, clips, nesterov=nesterov, backend="reference")
    assert launched.kernels and not wanted.kernels
    launched.launch()
    wanted.launch()
    for index, (shard, copy) in enumerate(zip(shards, copies, strict=True)):
        assert_values_equal(shard.momentum, copy.momentum, what=f"momentum {index}")
    assert_values_equal(launched.squares, wanted.squares, what="squares")
    for index, shard in enumerate(shards):
        dtype = (BF16, FP32)[index % 2]
        is_one_shape = len({one.rows for one in shard.rows}) == 1
        for rows in [None] if is_one_shape else range(len(shard.rows)):
            got, want = (packed_of(plan, index, rows, dtype) for plan in (launched, wanted))
            for one, other in zip(got, want, strict=True):
                assert_values_equal(one, other, what=f"{dtype} {index} {rows}")


@pytest.mark.parametrize(
    "nesterov", [True, pytest.param(False, marks=pytest.mark.extended)], ids=["nesterov", "plain"]
)
@pytest.mark.usefixtures("small_tiles")
def test_kernels_give_plain_torchs_bits(launches, nesterov):
    check_launches(normal_weights, hyper_of(*DECAYS), torch.tensor([0.7, 1.0, 1.5]), nesterov)
    assert set(launches) == {
        "momentum_kernel",
        "add_squares_kernel",
        "pack_kernel",
        "unpack_kernel",
    }


@pytest.mark.usefixtures("small_tiles")
def test_kernels_keep_subnormals_and_values_that_are_not_finite(launches):
    """Values of many powers of two, whose products with the clip factor are subnormal, too."""

    def draw(*shape, seed):
        values = wide_range_weights(*shape, seed=seed, exponents=(-145, 60))
        return values if seed % 4 else with_specials(values)

    check_launches(draw, hyper_of(0.9, 0.1, 0.0), torch.tensor([2.0**-3, 1.0, 0.3]), True)


@pytest.mark.usefixtures("small_tiles")
def test_kernels_skip_the_update_for_a_negative_clip_factor(launches):
    def draw(*shape, seed):
        values = normal_weights(*shape, seed=seed)
        return values if seed % 2 else torch.full_like(values, math.nan)  # gradients

    shards = shards_of(draw)
    clips = torch.full((3,), -1.0)
    check_launches(draw, hyper_of(*DECAYS), clips, True)
    plan = Momentum.build(shards, hyper_of(*DECAYS), clips, nesterov=True)
    plan.launch()
    for shard, untouched in zip(shards, shards_of(draw), strict=True):
        assert_bytes_equal(shard.momentum, untouched.momentum)
    assert plan.squares.isfinite().all()


def squares_by(plan, *shards, **options):
    built = plan(shards, hyper_of(0.9), torch.ones(1), nesterov=True, **options)
    built.launch()
    return built


@pytest.mark.usefixtures("small_tiles")
def test_no_layout_changes_a_bit(launches):
    """Experts in one weight or in several, gate and up in blocks or halves, at any address."""
    shape = (2, 12, 20)
    gradient, momentum = (normal_weights(*shape, seed=one).bfloat16().float() for one in range(2))
    whole = gate_and_up(12, None)

    def shard(values, rows, dtype=FP32, offset=0):
        return MatrixShard(
            parameter="fc1",
            gradient=placed(values[0].reshape(-1), dtype, offset),
            momentum=placed(values[1].reshape(-1), FP32, offset),
            shape=tuple(values[0].shape),
            rows=rows,
            group=0,
            norm=0,
        )

    stacked = shard((gradient, momentum), whole)
    want = squares_by(Momentum.build, stacked).squares
    apart = [shard((g[None], m[None]), whole) for g, m in zip(gradient, momentum, strict=True)]
    assert_bytes_equal(squares_by(Momentum.build, *apart).squares, want)
    for interleave in (1, 2, 3):
        order = torch.cat([indices_of(one) for one in gate_and_up(12, interleave)]).argsort()
        values = gradient[:, order], momentum[:, order]
        blocks = shard(values, gate_and_up(12, interleave), BF16, offset=interleave)
        plan = squares_by(Momentum.build, blocks)
        assert_bytes_equal(plan.squares, want, what=f"interleave {interleave}")
        assert_bytes_equal(
            blocks.momentum.view(shape)[:, order.argsort()], stacked.momentum.view(shape)
        )


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3)), min_size=1, max_size=4),
    st.sampled_from([None, 0, 1]),
    st.integers(1, 3),
    st.integers(1, 40),
)
def test_batches_that_are_unpacked_are_the_weights_again(cuts, taken, half, cols):
    """Any weights of several shards, in any number of pieces, gate and up or one of both."""
    hyper, clips = hyper_of(0.9), torch.ones(1)
    shards = [
        shard_of(gate_and_up(2 * half, 1), (first + count, 2 * half, cols), seed=seed)
        for seed, (first, count) in enumerate(cuts)
    ]
    plan = Momentum.build(shards, hyper, clips, nesterov=False)
    plan.squares.fill_(1.0)  # momentum itself
    pieces = [
        plan.piece(index, first, first + count, taken) for index, (first, count) in enumerate(cuts)
    ]
    packed = torch.full((sum(one.num_matrices for one in pieces), half, cols), math.nan)
    plan.plan_pack(pieces, packed).launch()
    got = torch.full((sum(one.numel for one in pieces),), math.nan)
    plan.plan_unpack(packed, pieces, got).launch()
    owned = [one.shard.momentum.view(one.shard.shape)[one.first :] for one in pieces]
    want = torch.cat([one.reshape(-1, half, 2, cols) for one in owned])
    if taken is not None:
        want = want.clone()
        want[:, :, 1 - taken] = math.nan
    assert_bytes_equal(got, want.reshape(-1))
