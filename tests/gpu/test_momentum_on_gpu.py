"""Momentum, packing and unpacking on a GPU give the bits of plain torch on a CPU."""

import math

import pytest
import torch

from moe_optim.kernels.fields import HYPER_FIELDS
from moe_optim.kernels.matrices import MatrixShard, split_rows
from moe_optim.kernels.momentum import Momentum
from tests.support.bytes import assert_values_equal
from tests.support.inputs import normal_weights, wide_range_weights, with_specials
from tests.support.matrix_rows import gate_and_up, whole_rows

pytestmark = pytest.mark.gpu

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
BOTH = pytest.mark.parametrize("nesterov", [True, False], ids=["nesterov", "plain"])
SHARDS = (
    (whole_rows(96), (3, 96, 1000), FP32, 0, 0),
    (whole_rows(768), (2, 768, 512), BF16, 1, 0),
    (gate_and_up(256, 32), (2, 256, 208), BF16, 1, 0),
    (gate_and_up(512, 64), (1, 512, 1024), FP32, 1, 0),
    (gate_and_up(128, None), (2, 128, 333), FP32, 0, 1),
    (gate_and_up(1004, 251), (1, 1004, 333), BF16, 0, 0),
    (split_rows(384, (64, 16, 16)), (1, 384, 320), BF16, 2, 0),
    (split_rows(96, (4, 1, 1)), (1, 96, 77), BF16, 2, 3),
)
"""Rows, shape, dtype of the gradient, group, and elements before the first: parts lie within one
group of rows, or in several, at even and odd addresses."""


def wide_with_specials(*shape, seed):
    return with_specials(wide_range_weights(*shape, seed=seed, exponents=(-145, 60)), every=9973)


def shards_on(device, draw=normal_weights):
    made = []
    for seed, (rows, shape, dtype, group, offset) in enumerate(SHARDS):
        numel = math.prod(shape)
        gradient, momentum = (draw(1, numel + offset, seed=2 * seed + one)[0] for one in range(2))
        made.append(
            MatrixShard(
                parameter=f"weight {seed}",
                gradient=gradient.to(device, dtype)[offset:],
                momentum=momentum.to(device)[offset:],
                shape=shape,
                rows=rows,
                group=group,
                norm=group,
            )
        )
    return made


def tables_on(device, clips=(0.7, 1.0, 1.5)):
    hyper = torch.full((3, HYPER_FIELDS), math.nan)
    hyper[:, 0] = torch.tensor([0.95, 0.3, 0.5])
    hyper[:, 1] = 1 - hyper[:, 0]
    return hyper.to(device), torch.tensor(clips, device=device)


def batches_of(plan):
    """Yield all matrices of one shape, packed, and unpacked into weights."""
    for index, shard in enumerate(plan.shards):
        for rows in range(len(shard.rows)):
            for dtype in (BF16, FP16, FP32):
                piece = plan.piece(index, rows=rows)
                shape = (piece.num_matrices, shard.rows[rows].rows, shard.shape[2])
                packed = torch.full(shape, math.nan, dtype=dtype, device=plan.device)
                weights = torch.full((piece.numel,), -1.0, dtype=dtype, device=plan.device)
                plan.plan_pack([piece], packed).launch()
                plan.plan_unpack(packed, [piece], weights).launch()
                yield packed
                yield weights


@BOTH
@pytest.mark.parametrize("clips", [(0.7, 1.0, 1.5), (1.0, -1.0, 2.0**-3)], ids=["all", "skipped"])
@pytest.mark.parametrize("draw", [normal_weights, wide_with_specials], ids=["normal", "wide"])
def test_a_launch_gives_the_bits_of_a_cpu(draw, clips, nesterov):
    """Momentum, sums of squares, batches and weights."""
    got, want = (
        Momentum.build(shards_on(device, draw), *tables_on(device, clips), nesterov=nesterov)
        for device in ("cuda", "cpu")
    )
    assert got.kernels and not want.kernels
    got.launch()
    want.launch()
    for one, other in zip(got.shards, want.shards, strict=True):
        assert_values_equal(one.momentum.cpu(), other.momentum, what=one.parameter)
    assert_values_equal(got.squares.cpu(), want.squares, what="squares")
    for number, (one, other) in enumerate(zip(batches_of(got), batches_of(want), strict=True)):
        assert_values_equal(one.cpu(), other, what=f"batch {number}")


@pytest.mark.usefixtures("alone")
def test_weights_of_more_than_two_to_the_31_elements_together():
    shape = (3, 1 << 15, 1 << 15)
    rows = gate_and_up(shape[1], 1 << 10)
    momentum = torch.full((math.prod(shape),), 2.0, device="cuda")
    gradient = torch.ones(momentum.numel(), dtype=BF16, device="cuda")
    shard = MatrixShard(
        parameter="large",
        gradient=gradient,
        momentum=momentum,
        shape=shape,
        rows=rows,
        group=0,
        norm=0,
    )
    hyper, clips = tables_on("cuda", (1.0,))
    hyper[0, :2] = 0.5
    plan = Momentum.build([shard], hyper, clips, nesterov=False)
    plan.launch()
    assert (momentum == 1.5).all()
    assert plan.squares.tolist() == [1.5**2 * (1 << 29)] * 6
    packed = torch.empty(2, shape[1] // 2, shape[2], dtype=BF16, device="cuda")
    pieces = [plan.piece(0, first=2)]
    plan.plan_pack(pieces, packed).launch()
    norm = torch.tensor(1.5 * math.sqrt(1 << 29))
    assert (packed == (1.5 / norm).bfloat16().cuda()).all()
