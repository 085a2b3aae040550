"""Steps along directions in pieces are steps of whole weights, which are then encoded."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_optim.formats import FORMATS, FP8_BLOCK, MXFP8, NVFP4, QuantizedWeight, reference
from moe_optim.kernels.adam_state import MasterState
from moe_optim.kernels.fields import HYPER_FIELDS
from moe_optim.kernels.member_table import MemberTable, TableEntry
from moe_optim.kernels.update import Updates
from tests.kernels.conftest import BLACKWELL, MORE_DTYPES, ONE_OF_EACH_KERNEL, STEPS_ALONG
from tests.support.bytes import assert_bytes_equal, assert_values_equal
from tests.support.inputs import poisoned
from tests.support.ptx.launches import emulate, plan_kernels
from tests.support.steps.directing import ROWS, Directing, stepped


def whole_tiles(format):
    return (3, max(64, format.block_row_height), 256)


def weights_of(format):
    """Return shapes and formats of weights that are read in every way: with masks and without."""
    ragged = (2, 33 if format.is_row_only else 64, 3 * max(32, format.block_length))
    if format.dimension_multiple == 1:
        ragged = (2, 136, 72)
    return [(whole_tiles(format), format), (ragged, format), ((2, 32, 40), torch.bfloat16)]


# Kernels


@STEPS_ALONG
def test_kernels_step_and_encode_pieces_as_the_whole(format, dtype, launches):
    run = Directing(weights_of(format), directions=dtype)
    for seed in (0, 100):
        run.step(run.directions(seed), seed)
        run.assert_equal_to_the_oracle()
    assert launches and not run.updates.finish.calls


@ONE_OF_EACH_KERNEL
def test_kernels_leave_experts_outside_of_the_pieces_alone(format, launches):
    """Masters and every byte of the gathered buffers."""
    run = Directing(weights_of(format)[:1])
    (state,), (target,), (before,) = run.states, run.targets, run.masters
    numel = state.master.numel() // 3
    (direction,) = run.directions(0)
    run.updates.plan_along([(0, numel, 2 * numel, direction[numel : 2 * numel])]).launch()
    whole = Directing(weights_of(format)[:1])
    whole.step([direction], seed=0)
    for expert, ours in enumerate((False, True, False)):
        here = slice(expert * numel, (expert + 1) * numel)
        want = whole.states[0].master if ours else before
        assert_values_equal(state.master[here], want[here], what=f"expert {expert}")
        filled = whole.targets[0] if ours else poisoned(format, whole_tiles(format))
        for name, buffer in target.gathered_buffers().items():
            want = filled.gathered_buffers()[name][expert]
            assert_bytes_equal(buffer[expert], want, what=f"expert {expert} {name}")


@pytest.mark.parametrize("format", [FP8_BLOCK, NVFP4, torch.float32], ids=str)
def test_kernels_keep_subnormals(format, launches):
    """As masters, as directions, as what is added to a master, and as results."""
    run = Directing([((1, 128, 128), format)])
    run.masters[0].copy_(torch.linspace(-3e-38, 3e-38, 128 * 128))
    run.states[0].master.copy_(run.masters[0])
    direction = torch.linspace(2e-38, -1e-38, 128 * 128).bfloat16()
    run.step([direction], seed=0)
    tiny = run.masters[0].abs()
    assert ((tiny > 0) & (tiny < 2.0**-126)).sum() > 1000
    run.assert_equal_to_the_oracle()


# Plain torch


@settings(max_examples=25)
@given(data=st.data())
def test_plain_torch_steps_and_encodes_pieces_as_the_whole(data):
    formats = [*FORMATS.values(), torch.bfloat16, torch.float32]
    sizes = st.integers(1, 3)
    shapes = st.builds(lambda e, r, c: (e, 32 * r, 128 * c), sizes, sizes, sizes)
    weights = data.draw(
        st.lists(st.tuples(shapes, st.sampled_from(formats)), min_size=1, max_size=4)
    )
    dtype = data.draw(st.sampled_from([*MORE_DTYPES.values()]))
    run = Directing(weights, directions=dtype, num_tables=data.draw(st.integers(1, 3)))
    for seed in (0, 100):
        run.step(run.directions(seed), data.draw(st.integers(0, 99)))
        run.assert_equal_to_the_oracle()


# Both


@pytest.fixture(params=["kernels", "plain torch"])
def backend(request, monkeypatch):
    """Have launches run as on a GPU, or have none."""
    if request.param == "kernels":
        emulate(monkeypatch, BLACKWELL)


@ONE_OF_EACH_KERNEL
def test_a_negative_clip_moves_nothing_and_encodes_again(format, backend):
    run = Directing([((2, 128, 128), format), ((1, 32, 32), torch.bfloat16)])
    run.clips.fill_(-1)
    before = [one.clone() for one in run.masters]
    run.step(run.directions(0), seed=0)
    run.assert_equal_to_the_oracle()
    for state, master in zip(run.states, before, strict=True):
        assert_bytes_equal(state.master, master)


def test_a_plan_reads_hyper_parameters_and_clip_factors_anew(backend):
    run = Directing([((1, 128, 128), FP8_BLOCK)])
    (direction,) = run.directions(0)
    plan = run.updates.plan_along([(0, 0, 128 * 128, direction)])
    want = run.masters[0]
    assert not run.updates.written
    for row, clip in ((ROWS[0], 1.0), (ROWS[1], 0.0), (ROWS[0], -1.0), (ROWS[0], 0.5)):
        run.hyper[0, : len(row)] = torch.tensor(row)
        run.clips.fill_(clip)
        plan.launch()
        want = want if clip < 0 else stepped(want, direction, row)
        assert_values_equal(run.states[0].master, want, what=f"{row}, clip {clip}")
    assert run.updates.written == {True}


def test_what_no_kernel_can_encode_is_encoded_after_all_pieces(launches):
    """Such as data whose neighbours in a row are two bytes apart."""
    target = QuantizedWeight.empty(FP8_BLOCK, (2, 128, 128))
    apart = torch.zeros(2, 128, 256, dtype=torch.uint8).view(target.rowwise_data.dtype)[..., ::2]
    target = replace(target, rowwise_data=apart)
    master = torch.linspace(-1, 1, 2 * 128 * 128)
    table = MemberTable.build([TableEntry(parameter="fc1", source=master, target=target)])
    updates = build(state_of(master=master), members=[table])
    updates.plan_along([(0, 0, master.numel(), torch.ones(master.numel()))]).launch()
    updates.finish.launch()
    assert launches == ["update_ranges_kernel"] and updates.finish.calls
    want = reference.quantize(master.view(2, 128, 128), FP8_BLOCK)
    for name, buffer in target.gathered_buffers().items():
        assert_bytes_equal(buffer, want.gathered_buffers()[name], what=name)


@pytest.fixture
def with_kernels(monkeypatch):
    """Tables have launches, whatever the device: they are read here, and not launched."""
    plan_kernels(monkeypatch)


def build(*states, members=()):
    tables = torch.zeros(1, HYPER_FIELDS), torch.ones(1)
    return Updates.build(states, *tables, rule="direction", members=members)


def state_of(numel=64, **others):
    return MasterState(**{"parameter": "fc1", "master": torch.zeros(numel)} | others)


def members_of(format, *, end, start=0, cuts=()):
    """Return a table of a range of a weight [2, 64, 64], and its master."""
    master = torch.zeros(end - start)
    entry = TableEntry(
        parameter="fc1",
        source=master,
        target=QuantizedWeight.empty(format, (2, 64, 64)),
        start=start,
        cuts=cuts,
    )
    return MemberTable.build([entry]), master


def test_a_range_of_experts_is_stepped_where_it_lies(backend):
    """The rank of the second expert writes its bytes alone."""
    table, master = members_of(MXFP8, start=4096, end=8192, cuts=(4096,))
    master.fill_(1.0)
    target = table.entries[0].target
    for buffer in target.buffers().values():
        buffer.view(torch.uint8).fill_(0xA5)
    updates = build(state_of(master=master), members=[table])
    updates.plan_along([(0, 0, 4096, torch.zeros(4096))]).launch()
    updates.finish.launch()
    for buffer in target.gathered_buffers().values():
        first, second = buffer.view(torch.uint8)
        assert (first == 0xA5).all() and (second != 0xA5).all()
