"""Launches of a step reach every element once, with what belongs to it; bad states are refused."""

from dataclasses import fields
from itertools import pairwise
from weakref import ref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_optim.errors import LayoutError
from moe_optim.kernels import staging
from moe_optim.kernels.adam_state import AdamState
from moe_optim.kernels.fields import (
    AMAX_SLOT,
    COLS,
    END,
    HYPER_FIELDS,
    STATE_FIELDS,
)
from moe_optim.kernels.step_table import StepTable
from tests.support.bytes import assert_bytes_equal
from tests.support.ptx.launches import plan_kernels
from tests.support.steps.stepping import Stepping, sharded_weights


@pytest.fixture(scope="module")
def with_kernels():
    """Tables have launches, whatever the device: they are read here, and not launched."""
    with pytest.MonkeyPatch.context() as patch:
        plan_kernels(patch)
        yield


def sizes_of(gradient, moments, weight):
    """Return how far the columns of two neighbouring elements lie apart, [7], given their bytes."""
    return torch.tensor([4, gradient, moments, moments, 0, 0, weight])


def sizes_in(constants):
    """Return the same of the dtypes that a kernel is compiled for."""
    nbytes = {"none": 0, "bf16": 2, "fp32": 4}
    return sizes_of(*(nbytes[constants[name]] for name in ("GRADIENT", "MOMENTS", "WEIGHTS")))


def ranges_of(plan):
    """Return arguments and constants of the launches over flat ranges."""
    kernels = [one for one in plan.kernels if one.kernel.__name__ == "update_ranges_kernel"]
    return [(one.arguments, one.constants) for one in kernels]


def members_of(plan, *, step):
    """Return arguments and constants of the launches over members, which step first or do not."""
    members = [one for one in plan.kernels if one.kernel.__name__.startswith("requantize")]
    kernels = [one for one in members if (one.constants["RULE"] != "none") is step]
    return [(one.arguments, one.constants | {"WEIGHTS": "none"}) for one in kernels]


def launched_elements(plan):
    """Return a row for every element of every launch, by address: master, then as in a state."""
    found = [torch.empty((0, 1 + STATE_FIELDS), dtype=torch.int64)]
    for (states, masters, parts, *_), constants in ranges_of(plan):
        for index, first, last, _ in parts.tolist():
            row = torch.cat([masters[index : index + 1], states[index]])
            found.append(row + torch.arange(first, last)[:, None] * sizes_in(constants))
    for (descriptors, tiles, _, _, states, *_), constants in members_of(plan, step=True):
        height = constants.get("TILE_ROWS", constants.get("BLOCK", 32))
        width = constants["TILE_COLS"]
        for number, first_row, first_col, _ in tiles.tolist():
            member = descriptors[number].tolist()
            rows = torch.arange(first_row, min(first_row + height, member[END] // member[COLS]))
            cols = torch.arange(first_col, min(first_col + width, member[COLS]))
            places = (rows[:, None] * member[COLS] + cols).flatten()
            row = torch.cat([torch.tensor(member[:1]), states[number]])
            found.append(row + places[:, None] * sizes_in(constants))
    return by_address(found)


def owned_elements(states):
    """Return the same of every element that there is."""
    found = [torch.empty((0, 1 + STATE_FIELDS), dtype=torch.int64)]
    for one in states:
        weight = 0 if one.weight is None else one.weight.itemsize
        places = [tensor.data_ptr() for tensor in one.tensors()[:4]]
        row = [*places, one.group, one.norm, 0 if one.weight is None else one.weight.data_ptr()]
        sizes = sizes_of(one.gradient.itemsize, one.exp_avg.itemsize, weight)
        found.append(torch.tensor(row) + torch.arange(one.master.numel())[:, None] * sizes)
    return by_address(found)


def by_address(found):
    rows = torch.cat(found)
    return rows[rows[:, 0].argsort()]


DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


@settings(max_examples=12)
@given(weights=sharded_weights(), gradients=DTYPES, moments=DTYPES)
def test_every_owned_element_is_stepped_once_with_what_belongs_to_it(
    with_kernels, weights, gradients, moments
):
    """Gradient, moments, hyper-parameters, clip factor and weight; wherever shards meet. What is
    called aligned starts at multiples of 16 bytes."""
    for table in Stepping(weights, gradients=gradients, moments=moments).tables:
        assert not table.remainder
        assert_bytes_equal(launched_elements(table.update), owned_elements(table.states))
        for (states, masters, parts, *_), constants in ranges_of(table.update):
            index, first = parts[:, 0], parts[:, 1:2]
            rows = torch.cat([masters[index, None], states[index]], 1)
            rows += first * sizes_in(constants)
            if constants["ALIGNED"]:
                assert not (rows[:, [0, 1, 2, 3, 6]] % 16).any()


@settings(max_examples=12)
@given(weights=sharded_weights())
def test_every_part_of_an_expert_has_a_slot_of_its_own_for_its_amax(with_kernels, weights):
    """The same as in a requantization: else one of them would read maxima that the other has left,
    as in a load after a step."""
    for table in Stepping(weights).tables:
        finding = [args for args, constants in ranges_of(table.update) if constants["AMAX"]]
        slots = [slot for args in finding for slot in args[2][:, 3].tolist()]
        assert len(slots) == len(set(slots))
        for args in finding:
            assert all(one.amax is args[5] for one in table.members.launches)
            assert 0 <= min(slots) <= max(slots) < args[5].numel()
        requantized = [
            one.descriptors[member, AMAX_SLOT].item() + part
            for one in (table.members.launches if table.members else ())
            for member, part in one.amax_parts.tolist()
        ]
        assert sorted(slots) == sorted(requantized)


# States of the host

SMALL = {"SMALLEST": 300, "CHUNK_BYTES": 12 * 8192}  # a chunk has at most so many elements in fp32


@pytest.fixture(scope="module")
def in_small_chunks():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SMALL.items():
            patch.setattr(staging, name, value)
        yield


@settings(max_examples=20)
@given(weights=sharded_weights())
def test_what_is_in_a_slot_together_overlaps_nowhere(with_kernels, in_small_chunks, weights):
    """Nor does it leave the slot, and neighbouring chunks have others."""
    for table in Stepping(weights, on_host=True).tables:
        assert all(one.slot != other.slot for one, other in pairwise(table.chunks))
        for chunk in table.chunks:
            slot = table.stage.slots[chunk.slot]
            ends = slot.data_ptr()
            for _, there in sorted(chunk.copies, key=lambda pair: pair[1].data_ptr()):
                assert there.data_ptr() >= ends and not there.data_ptr() % 16
                ends = there.data_ptr() + there.nbytes
            assert ends <= slot.data_ptr() + slot.nbytes


# States


def state_of(numel=64, **others):
    names = ("master", "gradient", "exp_avg", "exp_avg_sq")
    tensors = {name: torch.zeros(numel) for name in names}
    return AdamState(parameter="layers.1.fc2", **tensors | others)


def build(*states):
    return StepTable.build(states, torch.zeros(1, HYPER_FIELDS), torch.ones(1))


OFFLOADED = torch.zeros(64)
OFFLOADED.untyped_storage().resize_(0)
SHORT, HALF, BF16 = torch.zeros(63), torch.zeros(64).half(), torch.zeros(64).bfloat16()
BAD_STATES = {
    "a master in bf16": {"master": BF16},
    "a gradient elsewhere": {"gradient": torch.zeros(64, device="meta")},
    "a gradient with strides": {"gradient": torch.zeros(128)[::2]},
    "moments of two dtypes": {"exp_avg": BF16},
    "moments in bytes": {"exp_avg": HALF.byte(), "exp_avg_sq": HALF.byte()},
    "an offloaded master": {"master": OFFLOADED},
    "an offloaded moment": {"exp_avg": OFFLOADED},
    "a weight in fp16": {"weight": HALF},
}


@pytest.mark.parametrize("others", BAD_STATES.values(), ids=BAD_STATES)
def test_states_that_do_not_fit_are_refused_by_name(others):
    build(state_of())
    with pytest.raises(
        LayoutError, match=r"^layers\.1\.fc2: expected an fp32 master.*, got .*step: stock\."
    ) as raised:
        build(state_of(), state_of(**others))
    for tensor in others.values():
        assert f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}" in str(raised.value)


TENSORS = [one.name for one in fields(AdamState) if one.type in (torch.Tensor, torch.Tensor | None)]


@pytest.mark.parametrize("name", TENSORS)
def test_a_table_notices_when_something_has_moved(name):
    """Values that change in place move nothing, and what comes back has not moved."""
    first, second = state_of(), state_of(weight=torch.zeros(64))
    table = build(first, second)
    for tensor in second.tensors():
        tensor.fill_(2)
    assert not table.has_moved
    tensor = getattr(second, name)
    here, elsewhere = tensor.data, tensor.clone()
    tensor.data = elsewhere
    assert table.has_moved
    tensor.data = here
    assert not table.has_moved


def test_dropped_moments_are_freed_where_launches_know_their_addresses(with_kernels):
    """As where they are offloaded: `.cpu()` makes another tensor, and the first one is let go."""
    state = state_of(64)
    table = build(state).watching([state.master, state.gradient])
    assert table.update.kernels and not table.has_moved
    moments = [ref(state.exp_avg), ref(state.exp_avg_sq)]
    del state
    assert [moment() for moment in moments] == [None, None]
