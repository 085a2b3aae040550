"""A step in shards is a step of the whole, and its weights are those that quantizing would give."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_optim.formats import FORMATS, FP8_BLOCK, MXFP8
from moe_optim.formats.reference.adam import Hyper
from moe_optim.kernels import staging
from moe_optim.kernels.step_table import StepTable
from tests.support.bytes import assert_bytes_equal, assert_values_equal
from tests.support.formats import fitting
from tests.support.inputs import wide_range_weights
from tests.support.steps.stepping import (
    Stepping,
    Weight,
    assert_a_clip_of_zero_steps_without_gradients,
    gradients_of,
    sharded_weights,
)

EVERY_FORMAT = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS.keys())
HALVING = Hyper(lr=0.5, betas=(0.5, 0.5), eps=1.0, weight_decay=1.0, step=1)
"""Where there is no gradient, a master becomes a half of itself."""


DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


@settings(max_examples=15)
@given(weights=sharded_weights(), gradients=DTYPES, moments=DTYPES, decoupled=st.booleans())
def test_shards_of_any_cut_take_the_steps_of_the_whole(weights, gradients, moments, decoupled):
    """Masters, moments, dense weights and every byte of every buffer, after each of two steps."""
    run = Stepping(
        weights, gradients=gradients, moments=moments, decoupled=decoupled, clips=(1.0, 0.37)
    )
    for seed in (0, 100):
        run.step(gradients_of(weights, seed))
        run.assert_equal_to_the_whole()


@pytest.fixture(scope="module")
def in_small_chunks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "SMALLEST", 300)
        patch.setattr(staging, "CHUNK_BYTES", 12 * 8192)
        yield


@settings(max_examples=15)
@given(weights=sharded_weights(), gradients=DTYPES, moments=DTYPES, decoupled=st.booleans())
def test_states_that_pass_through_in_chunks_take_the_steps_of_the_whole(
    in_small_chunks, weights, gradients, moments, decoupled
):
    """Nothing is left on the way, and nothing of one chunk in the next."""
    run = Stepping(
        weights,
        gradients=gradients,
        moments=moments,
        decoupled=decoupled,
        clips=(1.0, 0.37),
        on_host=True,
    )
    for seed in (0, 100):
        run.step(gradients_of(weights, seed))
        run.assert_equal_to_the_whole()


CUTS = {  # of [2, 160, 32]
    "between experts": (32 * 160,),
    "between block rows": (32 * 128, 32 * 288),
    "inside a row": (32 * 70 + 14,),
    "twice in one block row": (32 * 3 + 2, 32 * 5 + 30),
    "one expert in three parts": (32 * 40, 32 * 130),
    "empty shards at both ends": (0, 2 * 160 * 32),
    "an empty shard inside of a block": (32 * 70 + 14, 32 * 70 + 14),
}


@pytest.mark.parametrize("bounds", CUTS.values(), ids=CUTS)
def test_where_shards_meet_makes_no_difference(bounds):
    """A weight of each format with blocks that fit, and what is shared of it in one exchange."""
    weights = [
        Weight(master=wide_range_weights(2, 160, 32, seed=seed), format=format, bounds=bounds)
        for seed, format in enumerate(FORMATS.values())
        if format.dimension_multiple <= 32
    ]
    run = Stepping(weights)
    run.step(gradients_of(weights, 100))
    run.assert_equal_to_the_whole()


CUTS_OF_THE_LAST_BLOCK_ROW = {
    "at its first element": 200 * 40 + 128 * 40,
    "in its first row": 128 * 40 + 5,
    "at its second row": 129 * 40,
    "in its middle": 200 * 40 + 163 * 40 + 39,
    "in its last row": 199 * 40 + 1,
    "at its last element": 200 * 40 - 1,
}


@pytest.mark.parametrize("cut", CUTS_OF_THE_LAST_BLOCK_ROW.values(), ids=CUTS_OF_THE_LAST_BLOCK_ROW)
def test_ranks_share_a_last_block_row_that_is_lower_than_its_blocks(cut):
    """Of 200 rows the last 72 have square blocks of 128 that go on below the weight."""
    master = wide_range_weights(2, 200, 40, seed=cut)
    weight = Weight(master=master, format=FP8_BLOCK, bounds=(cut,))
    run = Stepping([weight])
    for seed in (1, 2):
        run.step([wide_range_weights(2, 200, 40, seed=seed)])
        run.assert_equal_to_the_whole()
    block_rows = [table.members.exchanges[0].block_rows for table in run.tables]
    is_shared = cut % (200 * 40) != 128 * 40
    assert block_rows == [{(cut // (200 * 40), 128): 0} if is_shared else {}] * 2


def test_a_clip_factor_of_zero_is_a_step_without_gradients():
    """Masters decay and moments shrink: it is another thing than a step that is not taken."""
    masters = [wide_range_weights(1, 32, 64), wide_range_weights(500, seed=3)]
    weights = [Weight(master=masters[0], format=MXFP8), Weight(master=masters[1])]
    assert_a_clip_of_zero_steps_without_gradients(weights)


@EVERY_FORMAT
def test_maxima_of_the_last_step_are_forgotten(format):
    """Masters shrink; the third rank owns nothing of the block row that the first two share."""
    shape = fitting(format, (2, 160, 32))
    bounds = (shape[2] * 140 + 2, shape[2] * 160)
    weight = Weight(master=wide_range_weights(*shape), format=format, bounds=bounds)
    run = Stepping([weight], hypers=[HALVING])
    for number in (1, 2):
        run.step([torch.zeros_like(weight.master)])
        assert_bytes_equal(run.states(0)[0], weight.master.flatten() / 2**number)
        run.assert_equal_to_the_whole()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_dense_weights_are_written_and_nothing_beside_them(dtype):
    """Also without any quantized weight; other states may have no weight at all."""
    master, gradient = wide_range_weights(300), wide_range_weights(300, seed=1)
    run = Stepping([Weight(master=master, dtype=dtype)])
    (state,) = run.tables[0].states
    memory = torch.full((302,), 7.0, dtype=dtype)
    states = [replace(state, weight=memory[1:-1]), replace(state, master=master.clone())]
    states[1] = replace(
        states[1], weight=None, exp_avg=torch.zeros(300), exp_avg_sq=torch.zeros(300)
    )
    table = StepTable.build(states, run.hyper, run.clips)
    state.gradient.copy_(gradient)
    table.launch()
    assert_values_equal(memory[1:-1], state.master.to(dtype))
    assert memory[0] == memory[-1] == 7
    assert_bytes_equal(states[1].master, state.master)
    assert not torch.equal(state.master, master)
