"""What a pass over masters and buffers adds up, against definitions written out for one element."""

import math

import pytest
import torch

from moe_optim.formats import FORMATS, INT4, NVFP4, reference
from moe_optim.formats.health_figures import (
    NUM_SUMS,
    LayerHealth,
    Sum,
    distance_of_experts,
)
from moe_optim.formats.reference.health import measure_into
from tests.support.inputs import normal_weights
from tests.support.training_runs.health import assert_same_health, masters_of, measure

EVERY_FORMAT = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)


def health_of(format, master, buffers=None):
    """Return sums [NUM_SUMS] and amax of one expert [R, C]."""
    buffers = buffers or reference.quantize(master[None], format)
    sums, amaxes = torch.zeros(1, NUM_SUMS, dtype=torch.float64), torch.zeros(1)
    measure_into(sums, amaxes, master, 0, buffers)
    return sums[0], amaxes[0].item()


@EVERY_FORMAT
@pytest.mark.parametrize("cuts", [(0.0, 0.5, 1.0), (0.0, 0.21, 0.22, 0.83, 1.0)], ids=str)
def test_shards_add_up_to_the_whole(format, cuts):
    """Wherever they end: counts and maxima to the bit."""
    masters = masters_of(format)
    parts = [measure(format, masters, cuts=cuts, shard=i) for i in range(len(cuts) - 1)]
    sums = torch.stack([part[0] for part in parts]).sum(0)
    amaxes = torch.stack([part[1] for part in parts]).amax(0)
    whole = measure(format, masters)
    assert_same_health((sums, amaxes), whole, format.name)
    assert whole[0][:, Sum.FLUSHED].any() and whole[0][:, Sum.DEAD].any()


@EVERY_FORMAT
def test_the_error_is_that_of_the_values(format):
    master = normal_weights(128, 128, seed=1)
    weight = master.bfloat16().double()
    value = reference.dequantize(reference.quantize(master[None], format))[0].double()
    sums, amax = health_of(format, master)
    assert sums[Sum.ERRORS].item() == pytest.approx((value - weight).square().sum().item(), 1e-12)
    assert sums[Sum.SQUARES].item() == pytest.approx(weight.square().sum().item(), 1e-12)
    assert amax == weight.abs().max().item()
    assert sums[Sum.FLUSHED] == ((weight != 0) & (value == 0)).sum()
    assert sums[Sum.ELEMENTS] == weight.numel()


def test_an_expert_whose_encode_scale_overflows_saturates_nothing():
    """Of amax 2^-118: 2^128 / 6 of it, 170.7, rounds up to a scale of 176."""
    sums, _ = health_of(NVFP4, torch.full((16, 32), 2.0**-118))
    assert sums[Sum.SATURATED] == 0
    assert sums[Sum.ERRORS].item() == pytest.approx(512 * (2.0**-118 / 32) ** 2, 1e-6)


@EVERY_FORMAT
def test_blocks_without_a_value_are_dead(format):
    """Zeros of either sign, and a block row with one nonzero, which only its own block outlives."""
    rows, cols = 128, 256
    height, width = format.rowwise_block
    master = torch.zeros(rows, cols)
    master[0, ::2] = -0.0
    master[0, 0] = 1.0
    sums, _ = health_of(format, master)
    assert sums[Sum.BLOCKS] == rows // height * (cols // width)
    assert sums[Sum.DEAD] == sums[Sum.BLOCKS] - 1
    assert sums[Sum.FLUSHED] == 0


@EVERY_FORMAT
def test_a_block_scaled_to_its_amax_saturates_nothing_or_by_rounding_alone(format):
    """Scales of E4M3 formats are rounded away from clipping; those of NVFP4 to the nearest, which
    puts the amax of about every second block above the largest value. Those of INT4 are rounded to
    bf16, which is less than half a step."""
    sums, _ = health_of(format, normal_weights(256, 256, seed=2))
    share = sums[Sum.SATURATED] / sums[Sum.ELEMENTS]
    assert (0 < share < 0.05) if format.has_global_amax else share == 0


@EVERY_FORMAT
def test_stale_scales_show_as_saturation(format):
    """Masters that have doubled since they were quantized lie above what blocks hold."""
    master = normal_weights(128, 128, seed=3)
    buffers = reference.quantize(master[None], format)
    fresh, _ = health_of(format, master, buffers)
    stale, _ = health_of(format, master * 4, buffers)
    assert stale[Sum.SATURATED] > fresh[Sum.SATURATED] + 10
    assert stale[Sum.ERRORS] > fresh[Sum.ERRORS]


def test_an_int4_value_saturates_from_half_a_step_above_the_last_code_on():
    """Blocks of scale 1 that were quantized before a value grew: 7.5 rounds to 8, which is none."""
    buffers = reference.quantize(torch.full((1, 1, 32), 7.0), INT4)
    grown = torch.full((1, 32), 7.0)
    grown[0, :4] = torch.tensor([7.46875, -7.5, 7.53125, -7.53125])
    sums, _ = health_of(INT4, grown, buffers)
    assert sums[Sum.SATURATED] == 2


def test_blocks_too_small_for_their_expert_are_flushed_and_dead():
    """An NVFP4 block below 2^-10 of a scale step has scale 0: its codes are not zero, its values
    are."""
    master = torch.full((16, 32), 1e-9)
    master[0, 0] = 1.0
    buffers = reference.quantize(master[None], NVFP4)
    assert buffers.rowwise_data[0, :, 8:].any()
    sums, _ = health_of(NVFP4, master, buffers)
    assert sums[Sum.FLUSHED] == 16 * 32 - 1
    assert sums[Sum.DEAD] == 1
    assert sums[Sum.SATURATED] == 0


def test_a_nan_shows_in_the_error_and_not_in_the_amax():
    master = torch.ones(32, 32)
    master[3, 3] = math.nan
    sums, amax = health_of(FORMATS["mxfp8"], master)
    assert amax == 1.0
    assert math.isnan(sums[Sum.ERRORS])


def test_figures_are_quotients_of_sums():
    sums = torch.zeros(2, NUM_SUMS, dtype=torch.float64)
    sums[:, Sum.ELEMENTS], sums[:, Sum.BLOCKS] = 100, 10
    sums[0, Sum.SQUARES], sums[1, Sum.SQUARES] = 4.0, 16.0
    sums[0, Sum.ERRORS], sums[1, Sum.SATURATED], sums[1, Sum.FLUSHED] = 0.04, 3, 60
    sums[0, Sum.DEAD] = 1
    sums[:, len(Sum)] = 1.0
    health = LayerHealth(
        layer="layers.3.fc1",
        format="nvfp4",
        experts=(8, 9),
        amax=torch.tensor([0.5, 0.75], dtype=torch.float64),
        sums=sums,
    )
    layer = health.of_layer()
    assert layer == {
        "amax": 0.75,
        "norm": pytest.approx(math.sqrt(20)),
        "saturated": 0.015,
        "flushed": 0.3,
        "error": pytest.approx(math.sqrt(0.04 / 20)),
        "dead_blocks": 0.05,
        "norm_ratio": 2.0,
        "distance": 0.0,
    }
    assert health.of_experts()["error"].tolist() == [pytest.approx(0.1), 0.0]
    assert list(health.warnings()) == [
        "layers.3.fc1, expert 9: saturated is 0.03, above 0.02",
        "layers.3.fc1, expert 9: flushed is 0.6, above 0.3",
        "layers.3.fc1, expert 8: dead_blocks is 0.1, above 0.01",
    ]


def test_the_distance_is_0_of_copies_and_about_1_of_independent_experts():
    def sketches(weights):
        rows = [health_of(FORMATS["mxfp8"], weight)[0] for weight in weights]
        return torch.stack(rows)[:, len(Sum) :]

    one = normal_weights(1, 64, 64, seed=5)
    copies = one * torch.tensor([1.0, 2.0, 4.0]).view(3, 1, 1)
    assert distance_of_experts(sketches(copies)) == pytest.approx(0.0, abs=1e-12)
    others = normal_weights(16, 64, 64, seed=6)
    assert distance_of_experts(sketches(others)) == pytest.approx(1.0, abs=0.05)
    mixed = one + 0.5 * others  # cosine 1 / (1 + 0.25)
    assert distance_of_experts(sketches(mixed)) == pytest.approx(0.2, abs=0.1)
