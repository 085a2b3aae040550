"""States by name as boxes that a rank owns: where they lie, in place, and each element once."""

import itertools
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor

from moe_optim.checkpoint.owned_boxes import (
    OwnedBox,
    cut_into_boxes,
    owned_boxes,
    stored_parts,
)
from moe_optim.errors import LayoutError
from tests.support.checkpoints.checkpoint_journey import (
    STATES,
    Journey,
    Station,
    owned_states,
    run_once,
)
from tests.support.ranks import run_ranks

RESHARDABLE = "fully_reshardable"
EXPERTS, ROWS, COLUMNS = SHAPE = (3, 4, 5)
LAYERS, ALL_EXPERTS, TENSOR_RANKS = 2, 6, 2
MAIN = (0, 0, 0)


def _slices(start: tuple[int, ...], size: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(low, low + length) for low, length in zip(start, size, strict=True))


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_a_range_is_cut_into_few_boxes_in_flat_order(shape: list[int], data: st.DataObject):
    numel = prod(shape)
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, numel)] * 2)))
    places = torch.arange(numel).view(shape)
    for by_matrix in (False, True):
        boxes = list(cut_into_boxes(start, end, tuple(shape), by_matrix=by_matrix))
        assert by_matrix or len(boxes) <= max(1, 2 * len(shape) - 1)
        assert not by_matrix or all(prod(size[:-2]) == 1 for _, size in boxes)
        cut = [places[_slices(*box)].reshape(-1) for box in boxes]
        assert torch.cat([*cut, torch.arange(0)]).tolist() == list(range(start, end))


# What models store a weight [E, R, C] of local experts as


def _whole(weight: Tensor) -> ShardedTensor:
    places = (0, 1, LAYERS), (1, 1, ALL_EXPERTS // EXPERTS), (3, 1, TENSOR_RANKS)
    return ShardedTensor.from_rank_offsets(
        "w", weight, *places, prepend_axis_num=1, replica_id=MAIN
    )


def _gate_and_up(weight: Tensor, size: int) -> ShardedTensorFactory:
    def build(key: str, tensor: Tensor, replica_id: Any, _flat: Any = None) -> list[ShardedTensor]:
        return [
            ShardedTensor.from_rank_offsets(
                key,
                half,
                (0, 1, ALL_EXPERTS // EXPERTS),
                (1, number * size, 2 * size),
                replica_id=MAIN,
            )
            for number, half in enumerate(tensor.chunk(2, dim=1))
        ]

    return ShardedTensorFactory("w", weight, build, torch.cat)


def _member_each(weight: Tensor) -> ShardedTensorFactory:
    def build(key: str, tensor: Tensor, replica_id: Any, _flat: Any = None) -> list[ShardedTensor]:
        return [
            ShardedTensor.from_rank_offsets(
                key,
                one,
                (0, 1, LAYERS),
                (1, expert, ALL_EXPERTS),
                prepend_axis_num=2,
                replica_id=MAIN,
            )
            for expert, one in enumerate(tensor.unbind(0))
        ]

    return ShardedTensorFactory("w", weight, build, torch.stack)


def _key_each(weight: Tensor) -> ShardedTensorFactory:
    def build(key: str, tensor: Tensor, replica_id: Any, _flat: Any = None) -> list[ShardedTensor]:
        members = enumerate(tensor.unbind(0))
        return [
            ShardedTensor.from_rank_offsets(f"{key}{n}", one, replica_id=MAIN) for n, one in members
        ]

    return ShardedTensorFactory("w", weight, build, torch.stack)


STORED = {
    "one tensor": (_whole, 1),
    "gate and up": (lambda weight: _gate_and_up(weight, 1), 2),
    "gate and up, cut by tensor parallelism": (lambda weight: _gate_and_up(weight, 2), 2),
    "an entry per expert": (_member_each, EXPERTS),
    "a key per expert": (_key_each, EXPERTS),
}


def _place(files: dict[str, Tensor], entry: ShardedTensor, offset: Any, values: Tensor) -> None:
    file = files.setdefault(entry.key, torch.zeros(entry.global_shape))
    file[_slices(offset, values.shape)] += values


@pytest.mark.parametrize(("make", "count"), STORED.values(), ids=STORED)
def test_boxes_of_any_ranges_fill_a_file_as_the_whole_parameter_does(make: Any, count: int):
    """For every cut into two ranges; a whole parameter has one box of each tensor."""
    weight = torch.arange(1.0, 1 + prod(SHAPE)).view(SHAPE)
    entry, want, numel = make(weight), {}, weight.numel()
    for part in nested_values([entry.build() if hasattr(entry, "build") else entry]):
        axes = (1,) * part.prepend_axis_num
        _place(want, part, part.global_offset, part.data.view(*axes, *part.local_shape))
    parts = stored_parts(entry, SHAPE)
    assert len(list(owned_boxes(parts, cut_into_boxes(0, numel, SHAPE)))) == count
    for cut in range(numel + 1):
        got: dict[str, Tensor] = {}
        for start, end in itertools.pairwise((0, cut, numel)):
            ranges = cut_into_boxes(start, end, SHAPE, by_matrix=bool(cut % 2))
            for box in owned_boxes(parts, ranges):
                _place(got, box.part, box.offset, _values(weight, box))
        assert got.keys() == want.keys()
        assert all(torch.equal(got[key], want[key]) for key in want)


def _values(weight: Tensor, box: OwnedBox) -> Tensor:
    values = weight[_slices(box.start, box.size)]
    while values.ndim > len(box.offset):
        (values,) = values
    return values.view((1,) * (len(box.offset) - values.ndim) + values.shape)


def _stored(weights: Callable[[Tensor], list[Tensor]]) -> ShardedTensorFactory:
    def build(key: str, tensor: Tensor, replica_id: Any, _flat: Any = None) -> list[ShardedTensor]:
        return [
            ShardedTensor.from_rank_offsets(f"{key}{n}", one, replica_id=MAIN)
            for n, one in enumerate(weights(tensor))
        ]

    return ShardedTensorFactory("w", torch.zeros(SHAPE), build, torch.stack)


def test_a_parameter_that_is_stored_twice_has_every_box_twice():
    """Such as an adapter of all experts, which each expert's entry holds."""
    ranges = list(cut_into_boxes(1, prod(SHAPE) - 1, SHAPE))
    boxes = list(owned_boxes(stored_parts(_stored(lambda one: [one, one]), SHAPE), ranges))
    once = list(owned_boxes(stored_parts(_stored(lambda one: [one]), SHAPE), ranges))
    assert [(box.start, box.size) for box in boxes[::2]] == [(b.start, b.size) for b in once]
    assert [(box.start, box.size) for box in boxes[1::2]] == [(b.start, b.size) for b in once]
    assert {box.part.key for box in boxes} == {"w0", "w1"}


@pytest.mark.parametrize(
    "weights",
    [lambda one: [one, one[:1]], lambda one: [one[:1], one[:1]], lambda one: [*one, *one[1:]]],
    ids=["whole and part", "the same part", "a part missing"],
)
def test_slices_stored_unequally_often_are_refused(weights: Any):
    with pytest.raises(LayoutError, match="w: expected tensors that are slices .* by name"):
        stored_parts(_stored(weights), SHAPE)


@pytest.mark.parametrize(
    "change",
    [Tensor.clone, lambda one: one.transpose(0, 1), lambda one: one[1:], lambda one: one.view(-1)],
    ids=["copied", "transposed", "shortened", "flattened"],
)
def test_a_parameter_stored_as_anything_but_its_slices_is_refused(change: Any):
    def build(key: str, tensor: Tensor, replica_id: Any, _flat: Any = None) -> list[ShardedTensor]:
        return [ShardedTensor.from_rank_offsets(key, change(tensor), replica_id=MAIN)]

    entry = ShardedTensorFactory("w", torch.zeros(SHAPE), build, torch.cat)
    with pytest.raises(LayoutError, match="w: expected tensors that are slices .* by name"):
        stored_parts(entry, SHAPE)


# On ranks

GROUPED = Station()
STOCK = Station(experts="sequential", format="bf16", stock=True)


def _find_copies(station: Station, folder: Path) -> list[str]:
    """Return the keys of saved and loaded entries beside the memory of masters and moments."""
    journey = Journey(station).fill()
    metadata = {"distrib_optim_sharding_type": RESHARDABLE, "dp_cp_group": journey.groups.dp_cp}
    model = journey.state(RESHARDABLE)["model"]
    before, found = _memory(journey), []
    for part, is_loading in itertools.product(journey.parts, (False, True)):
        state = part.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
        entries = nested_values(state["param_state"])
        boxes = [entry for entry in entries if isinstance(entry, ShardedTensor)]
        assert boxes
        memory = [box.data.untyped_storage().data_ptr() for box in boxes]
        found += [box.key for box, at in zip(boxes, memory, strict=True) if at not in before]
    journey.save(folder, RESHARDABLE)
    journey.load(folder)
    return found + ["after a load"] * (_memory(journey) != before)


def _memory(journey: Journey) -> set[int]:
    return {
        one.untyped_storage().data_ptr()
        for part in journey.parts
        for master, moments in part.optimizer.state.items()
        for one in (master, *moments.values())
    }


def test_states_are_saved_from_and_loaded_into_the_memory_where_they_lie(tmp_path: Path):
    assert run_ranks(3, _find_copies, GROUPED, tmp_path / "saved") == [[], [], []]


def _save(station: Station, folder: Path) -> None:
    Journey(station).fill().save(folder, RESHARDABLE)


def _load_and_save(station: Station, source: Path, target: Path) -> int:
    journey = Journey(station).scramble().load(source)
    journey.save(target, RESHARDABLE)
    return journey.check()


@pytest.mark.slow
def test_stock_loads_them_and_is_loaded_at_other_sizes(tmp_path: Path):
    """Three ranks cut inside of experts. Every element is checked at every station."""
    run_ranks(3, _save, GROUPED, tmp_path / "0")
    stations = (2, STOCK), (3, GROUPED.but(experts="indexed", format="nvfp4"))
    for number, (size, station) in enumerate(stations):
        folders = (tmp_path / str(number), tmp_path / str(number + 1))
        assert all(run_ranks(size, _load_and_save, station, *folders))


def _save_with_wrong_ranges(station: Station, moved: int, folder: Path) -> str:
    """Move the end of the last range that the first rank owns in its first optimizer."""
    journey = Journey(station).fill()
    if torch.distributed.get_rank() == 0:
        (buckets,) = journey.parts[0].gbuf_ranges[0].values()
        *_, ranges = sorted(
            (one["param"] for one in buckets[0]["param_map"].values()),
            key=lambda one: one.end - one.start,
        )
        ranges.end += moved
    with pytest.raises(LayoutError) as caught:
        journey.save(folder, RESHARDABLE)
    assert not folder.exists()
    return str(caught.value)


def test_what_would_be_saved_twice_or_not_at_all_is_refused_on_every_rank(found):
    """Before there is a file: otherwise the first rank fails while all others wait for it."""
    for name, says in (("hole", "owned by no rank"), ("overlap", "owned by several ranks")):
        for said in found(2, name):
            assert says in said and "Nothing has been saved" in said


def _save_and_scramble(journey: Journey, folder: Path) -> None:
    """Save asynchronously, and change all states before anything is written."""
    later = {"async_sharded_save": True, "async_strategy": "mcore"}
    request = journey.save(folder, RESHARDABLE, **later)
    for part in journey.parts:
        for _, _, states in owned_states(part):
            for name in STATES:
                states[name].detach().fill_(-1.0)
    request.execute_sync()


def _step_while_saving(folder: Path) -> int:
    journey = Journey(GROUPED).fill()
    _save_and_scramble(journey, folder)
    return journey.load(folder).check()


def test_an_asynchronous_save_has_the_states_of_the_call(found):
    """Masters and moments that a step changes in place before they are written."""
    assert all(found(2, "stepped"))


def _save_narrow_moments(folder: Path, later: bool) -> int:
    """Save bf16 moments, and load them into fp32 ones; return how many elements were compared."""
    journey = Journey(GROUPED).fill()
    narrow = [state for part in journey.parts for state in part.optimizer.state.values()]
    for state in narrow:
        state["exp_avg"] = state["exp_avg"].bfloat16()
    want = [state["exp_avg"].float() for state in narrow]
    if later:
        _save_and_scramble(journey, folder)
    else:
        journey.save(folder, RESHARDABLE)
    loaded = Journey(GROUPED).scramble().load(folder)
    got = [state["exp_avg"] for part in loaded.parts for state in part.optimizer.state.values()]
    assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))
    return sum(one.numel() for one in got)


def test_narrow_moments_are_saved_as_the_fp32_values_of_the_call(found):
    """At once, and asynchronously."""
    assert all(found(2, "narrow") + found(2, "narrow, later"))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function of ranks and a name, which gives what these ranks found."""
    jobs = {
        "hole": partial(_save_with_wrong_ranges, GROUPED.but(tp=2), -2),
        "overlap": partial(_save_with_wrong_ranges, GROUPED, 1),
        "stepped": _step_while_saving,
        "narrow": partial(_save_narrow_moments, later=False),
        "narrow, later": partial(_save_narrow_moments, later=True),
    }
    return run_once(tmp_path_factory.mktemp("boxes"), {2: jobs})
