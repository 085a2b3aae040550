"""A step of all matrices of a rank, against emerging-optimizers one matrix at a time."""

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moe_optim.errors import ConfigError
from moe_optim.formats import FORMATS, QuantizedWeight, get_format, reference
from moe_optim.formats.reference.newton_schulz import Orthogonalization
from moe_optim.kernels.member_table import MemberTable
from moe_optim.kernels.table_entry import TableEntry
from moe_optim.optimizer.muon_step import check_workspace
from tests.support.bytes import assert_bytes_equal
from tests.support.steps.muon_steps import (
    DEFAULTS,
    expected_step,
    make_states,
    step,
    weight_of,
)

SPLITS = [(), (16, 8, 8), (16, 16)]
"""One matrix; queries, keys and values; alternating gate and up: of 64 rows, in periods of 32."""
BY_SHAPE = Orthogonalization(scale_mode="unit_rms_norm", extra_scale_factor=0.2, num_steps=3)


@settings(max_examples=12)
@given(
    split=st.sampled_from(SPLITS),
    cols=st.sampled_from([32, 64, 96]),
    nesterov=st.booleans(),
    how=st.sampled_from(
        [
            Orthogonalization(),
            Orthogonalization(coefficient_type="deepseekv4", num_steps=10, precision="high"),
            BY_SHAPE,
        ]
    ),
    clip=st.sampled_from([1.0, 0.3]),
)
@example(split=(16, 8, 8), cols=32, nesterov=False, how=BY_SHAPE, clip=1.0)
def test_a_step_is_that_of_emerging_optimizers(
    split: tuple[int, ...], cols: int, nesterov: bool, how: Orthogonalization, clip: float
):
    """Of two groups with other rates and clip factors. Momentum is equal to the bit. Masters differ
    by a small part of the update where the norm of a matrix, summed in fp64 here and in fp32 there,
    rounds differently."""
    chosen = replace(DEFAULTS, orthogonalization=how, nesterov=nesterov)
    states = make_states([(weight_of(64, cols, split), 3), (weight_of(64, cols, split), 1)])
    expected = [expected_step(state, chosen, clip) for state in states]
    before = [state.master.clone() for state in states]
    step(states, chosen, clip)
    for state, old, (master, momentum) in zip(states, before, expected, strict=True):
        assert_bytes_equal(state.momentum, momentum, what="momentum")
        moved = (master - old).norm()
        assert (state.master - master).norm() <= 0.02 * moved
        assert state.weight is not None
        assert_bytes_equal(state.weight, state.master.bfloat16(), what="copy")


@pytest.mark.parametrize("split", SPLITS)
def test_batches_and_owners_do_not_change_bits(split: tuple[int, ...]):
    """One table of all weights, one per weight, and a workspace of one weight give equal bits."""
    weight = weight_of(64, 96, split)
    whole = make_states([(weight, 6)])
    parts = make_states([(weight, 6)])
    small = make_states([(weight, 6)])
    step(whole)
    for number in range(6):
        owned = slice(number * weight.numel, (number + 1) * weight.numel)
        (of_all,) = parts
        step(
            [
                replace(
                    of_all,
                    master=of_all.master[owned],
                    gradient=of_all.gradient[owned],
                    momentum=of_all.momentum[owned],
                    weight=None if of_all.weight is None else of_all.weight[owned],
                )
            ]
        )
    tight = replace(DEFAULTS, workspace_bytes=200_000)
    assert len(step(small, tight).chunks) > 1
    for others in (parts, small):
        for name in ("master", "momentum", "weight"):
            got, want = getattr(others[0], name), getattr(whole[0], name)
            assert_bytes_equal(got, want, what=name)


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "bf16"])
def test_quantized_weights_come_from_the_stepped_masters(name: str):
    """Data and scales of every expert are the reference's of the new master."""
    format = get_format(name)
    weight = weight_of(128, 256)
    (state,) = make_states([(weight, 3)])
    target = QuantizedWeight.empty(format, (3, 128, 256), device="cpu")
    entry = TableEntry(parameter="w", source=state.master, target=target)
    members = MemberTable.build([entry])
    step([replace(state, weight=None)], members=[members])
    expected = reference.quantize(state.master.view(3, 128, 256), format)
    members.finish.launch()
    for buffer, tensor in expected.gathered_buffers().items():
        assert_bytes_equal(target.gathered_buffers()[buffer], tensor, what=buffer)


def test_a_negative_clip_factor_changes_nothing():
    """A skipped step leaves masters and momentum as they are."""
    states, old = make_states([(weight_of(64, 96), 2)]), make_states([(weight_of(64, 96), 2)])
    step(states, clip=-1.0)
    assert_bytes_equal(states[0].master, old[0].master, what="master")
    assert_bytes_equal(states[0].momentum, old[0].momentum, what="momentum")


def test_a_weight_larger_than_the_workspace_is_refused_by_name():
    """The message names the weight, its shape, and a size that suffices."""
    weight = weight_of(512, 1024, name="decoder.layers.0.mlp.experts.linear_fc1.weight")
    tight = replace(DEFAULTS, workspace_bytes=1 << 20)
    with pytest.raises(ConfigError, match=r"muon_workspace_mib: expected at least 4 .*linear_fc1"):
        check_workspace([weight], tight)
    check_workspace([weight], replace(DEFAULTS, workspace_bytes=4 << 20))
