"""One load: metadata vetted once, every byte read once, and what is read is what was saved."""

import hashlib
import json
import os
import pickle
import random
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from moe_optim.checkpoint.files import untrusted_files
from moe_optim.checkpoint.files.archives import Archive
from moe_optim.checkpoint.files.folders import CHECKSUM_MANIFEST
from moe_optim.checkpoint.files.metadata import Blob, read_blobs
from moe_optim.checkpoint.files.untrusted_files import file_range
from moe_optim.checkpoint.integrity import corrupt_files
from moe_optim.checkpoint.load_session import _READERS, CheckedReader
from moe_optim.errors import LayoutError, StateError
from moe_optim.optimizer.chained import GraphedStep
from moe_optim.weights.partial_loads import require_loaded
from tests.support.checkpoints.checkpoint_journey import Journey, Station, run_once
from tests.support.hostile.damage import flip
from tests.support.hostile.hostile_pickles import Command

GROUPED = Station()
RESHARDABLE = "fully_reshardable"
FLIPS = 12


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function of ranks and a name, which gives what these ranks found."""
    alone = {
        "reads": _count_reads,
        "flipped": _load_flipped,
        "another file": _load_another_file,
        "unfinished": _load_weights_beside_damage,
        "copies": _count_copies,
        "in place": _count_copies_of_load,
        "one entry": _load_a_list_of_one_entry,
        "surplus": _load_a_surplus_key,
    }
    together = {
        "one reads": _load_what_one_rank_reads,
        "partly": _go_on_after_a_failed_load,
        **{name: partial(_fail_in_the_optimizer, name) for name in FAILING},
        **{name: partial(_fail_in_the_model, name) for name in MODEL_LOADS},
        "request": _fail_to_request,
        "scattered": _fail_before_states_are_scattered,
        "kept": _fail_to_read_what_is_kept,
        "metadata": _load_beside_foreign_metadata,
        "exchanged": _load_and_exchange,
        "not exchanged": _fail_to_exchange,
    }
    return run_once(tmp_path_factory.mktemp("sessions"), {1: alone, 2: together})


def _said_of_load(station: Station, folder: Path) -> str:
    try:
        Journey(station).scramble().load(folder)
    except (LayoutError, StateError) as error:
        return str(error)
    return "loaded"


def _blobs(folder: Path) -> tuple[Blob, ...]:
    return read_blobs((folder / ".metadata").read_bytes())


def _count_reads(folder: Path) -> tuple[int, int, int]:
    """Return the most often that any byte of a tensor was read, the bytes read, and those saved."""
    Journey(GROUPED).fill().save(folder, RESHARDABLE)
    journey, times, stock = Journey(GROUPED).scramble(), Counter[tuple[str, int]](), os.preadv

    def preadv(descriptor: int, memory: Any, start: int) -> int:
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        times.update((name, at) for at in range(start, start + len(memory[0])))
        return stock(descriptor, memory, start)

    untrusted_files.os.preadv = preadv  # type: ignore[attr-defined]
    try:
        assert journey.load(folder).check()
    finally:
        untrusted_files.os.preadv = stock  # type: ignore[attr-defined]
    tensors = [
        (blob.file, at)
        for blob in _blobs(folder)
        if blob.offset is not None
        for at in range(blob.start, blob.end)
    ]
    size = sum(path.stat().st_size for path in folder.glob("*.distcp"))
    return max(times[place] for place in tensors), times.total(), size


def test_a_load_reads_every_byte_of_a_tensor_once(found):
    """And with all objects at most 1.05 of the file, which one rank needs all of."""
    ((most, total, size),) = found(1, "reads")
    assert most == 1
    assert total <= 1.05 * size


def _load_flipped(folder: Path) -> Counter[str]:
    """Flip one bit after the other anywhere in the data, and load."""
    Journey(GROUPED).fill().save(folder, RESHARDABLE)
    journey, rng, outcome = Journey(GROUPED).scramble(), random.Random(0), Counter[str]()
    for _ in range(FLIPS):
        path = rng.choice(sorted(folder.glob("*.distcp")))
        content = path.read_bytes()
        path.write_bytes(flip(content, rng.randrange(len(content)), rng.randrange(8)))
        journey.scramble()
        try:
            outcome["loaded to the bit"] += bool(journey.load(folder).check())
        except StateError as error:
            outcome["named" if path.name in str(error) else str(error)] += 1
        path.write_bytes(content)
    return outcome


def test_a_flipped_bit_is_found_while_it_is_read_or_is_in_nothing_that_is_read(found):
    (outcome,) = found(1, "flipped")
    assert set(outcome) <= {"loaded to the bit", "named"}
    assert outcome["named"] > FLIPS // 2


def _load_what_one_rank_reads(folder: Path) -> str:
    """Flip a byte of the last chunk of a moment, which the last rank alone reads."""
    Journey(GROUPED).fill().save(folder, RESHARDABLE)
    _damage_last_moment(folder)
    return _said_of_load(GROUPED, folder)


def _damage_last_moment(folder: Path) -> None:
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        moments = [blob for blob in _blobs(folder) if ".exp_avg." in blob.key]
        last = max(moments, key=lambda blob: (blob.key, blob.corner))
        path = folder / last.file
        path.write_bytes(flip(path.read_bytes(), last.start + last.length // 2, 3))
    torch.distributed.barrier()


def _go_on_after_a_failed_load(folder: Path) -> tuple[list[str], int]:
    """Step, and save, after a load that one rank fails, and after another load.

    Returns what was said of steps and save, and how many elements the other load restored.
    """
    bf16 = Station(format="bf16")
    for name in ("good", "bad"):
        Journey(bf16).fill().save(folder / name, RESHARDABLE)
    _damage_last_moment(folder / "bad")
    journey = Journey(bf16).scramble()
    with pytest.raises(StateError, match="Bad CRC-32"):
        journey.load(folder / "bad")
    said = _refusals(journey, folder)
    Journey(bf16).fill().save(folder / "of another model", RESHARDABLE)
    restored = journey.load(folder / "good").check()
    journey.save(folder / "next", RESHARDABLE)
    require_loaded(journey.optimizer._tensors)
    return said, restored


def test_half_loaded_weights_are_neither_trained_nor_saved(found):
    """On every rank, also on one that has read all of its own; until another load ends."""
    for said, restored in found(2, "partly"):
        assert len(said) == 3
        assert all("that a failed load of" in one for one in said)
        assert restored


def _refusals(journey: Journey, folder: Path) -> list[str]:
    """Return what is said of a step, of one of a graph, and of a save."""
    said, step = [], journey.optimizer.step
    save = partial(journey.save, folder / "next", RESHARDABLE)
    for act in (step, GraphedStep(journey.optimizer), save):
        with pytest.raises(StateError) as refusal:
            act()
        said.append(str(refusal.value))
    return said


def _fail_in_the_optimizer(name: str, folder: Path) -> tuple[str, list[str], int]:
    """Fail on one rank in what an optimizer does once everything is read; then load again.

    Returns what the load says, what steps and saves say then, and how many elements were restored.
    """
    rank, target, load, error = FAILING[name]
    journey = Journey(GROUPED).fill()
    journey.save(folder, RESHARDABLE)
    journey.optimizer.save_parameter_state(f"{folder}/{torch.distributed.get_rank()}.pt")
    torch.distributed.barrier()
    journey.keep("atomic").scramble()
    fails = torch.distributed.get_rank() == rank
    with (
        mock.patch(target, side_effect=error("it was the last")) if fails else nullcontext(),
        pytest.raises((error, StateError)) as raised,
    ):
        load(journey, folder)
    said, restored = _recover(journey, folder)
    return str(raised.value), said, restored


def _recover(journey: Journey, folder: Path) -> tuple[list[str], int]:
    """Return what is said of steps and saves, also after groups alone; then load, step and save."""
    said = _refusals(journey, folder)
    journey.optimizer.load_state_dict(journey.optimizer.state_dict())  # groups alone
    said += _refusals(journey, folder)
    restored = journey.scramble().load(folder).check()
    journey.save(folder.with_name(f"{folder.name} restored"), RESHARDABLE)
    journey.optimizer.step()
    return said, restored


def _load_files(journey: Journey, folder: Path) -> None:
    journey.optimizer.load_parameter_state(f"{folder}/{torch.distributed.get_rank()}.pt")


FAILING: dict[str, tuple[int, str, Callable[[Journey, Path], Any], type[BaseException]]] = {
    # rank that fails, in what, the load, and the error
    "states by name": (
        1,
        "moe_optim.checkpoint.owned_boxes.load_states",
        Journey.load,
        KeyboardInterrupt,
    ),
    "a chunk": (
        1,
        "moe_optim.checkpoint.files.archives.Archive.read_tensor",
        Journey.load,
        KeyboardInterrupt,
    ),
    "parameter groups": (
        1,
        "moe_optim.checkpoint.param_groups.states_by_part",
        Journey.load,
        MemoryError,
    ),
    "a local checkpoint": (
        1,
        "moe_optim.checkpoint.flat_states.load_flat_states",
        lambda journey, _: journey.restore("atomic"),
        MemoryError,
    ),
    "a file of --ckpt-format torch": (0, "torch.load", _load_files, MemoryError),
    "its order": (
        0,
        "moe_optim.checkpoint.flat_states.rearranged_states",
        _load_files,
        MemoryError,
    ),
}


@pytest.mark.parametrize("name", FAILING)
def test_what_one_rank_fails_to_take_over_is_neither_trained_nor_saved_on_any(found, name):
    rank = FAILING[name][0]
    for number, (raised, said, restored) in enumerate(found(2, name)):
        assert "it was the last" in raised
        assert number == rank or f"rank {rank}" in raised
        assert len(said) == 6 and all("that a failed load of" in one for one in said)
        assert restored


MODEL_LOADS: dict[str, Callable[[Journey, Path], Any]] = {
    "weights and states": Journey.load,
    "weights alone": Journey.load_weights,
    "weights of a local checkpoint": lambda journey, _: journey.restore("atomic"),
}


def _fail_in_the_model(name: str, folder: Path) -> tuple[list[str], int]:
    """Fail on one rank in ``load_state_dict`` of the model, once all of a checkpoint is read."""
    journey = Journey(GROUPED).fill()
    journey.save(folder, RESHARDABLE)
    journey.keep("atomic").scramble()
    target = "moe_optim.experts.grouped_linear.GroupedLinear._load_from_state_dict"
    if torch.distributed.get_rank() == 1:
        with mock.patch(target, side_effect=MemoryError), pytest.raises(MemoryError):
            MODEL_LOADS[name](journey, folder)
    if torch.distributed.get_rank() == 0:
        with pytest.raises(StateError) if name != "weights alone" else nullcontext():
            MODEL_LOADS[name](journey, folder)
    elif name != "weights alone":  # the step, while the other loads states
        with pytest.raises(StateError, match="that a failed load of"):
            journey.optimizer.step()
    return _recover(journey, folder)


@pytest.mark.parametrize("name", MODEL_LOADS)
def test_what_the_model_of_one_rank_fails_to_take_over_is_refused_on_every_rank(found, name):
    for said, restored in found(2, name):
        assert len(said) == 6 and all("that a failed load of" in one for one in said)
        assert restored


def _load_a_surplus_key(folder: Path) -> str:
    """Load weights beside a key that no module has, then step; return what the step says."""
    journey = Journey(GROUPED).fill()
    begin_step = journey.optimizer.begin_step
    state = {**journey.model.state_dict(), "surplus": torch.zeros(1)}
    with pytest.raises(RuntimeError, match="surplus"):
        journey.model.load_state_dict(state)
    with pytest.raises(StateError) as refusal:
        begin_step()
    journey.model.load_state_dict(state, strict=False)
    begin_step()
    with pytest.raises(RuntimeError, match="surplus"):
        journey.model.load_state_dict(state)
    del state["surplus"]
    journey.model.load_state_dict(state)
    begin_step()
    return str(refusal.value)


def test_a_step_after_a_load_that_refused_a_key_names_the_key_and_both_ways_on(found):
    """torch raises once it has copied all others, also where it was given all."""
    (said,) = found(1, "surplus")
    assert 'load of the state of Model (Unexpected key(s) in state_dict: "surplus".' in said
    assert said.endswith("unexpected or missing, repeat it with strict=False.")


def _fail_to_request(folder: Path) -> str:
    """Return what is said if one rank cannot ask for its states."""
    journey = Journey(GROUPED).fill()
    journey.save(folder, RESHARDABLE)
    fails = torch.distributed.get_rank() == 1
    target = "moe_optim.checkpoint.owned_boxes.states_to_load"
    with (
        mock.patch(target, side_effect=MemoryError("it failed")) if fails else nullcontext(),
        pytest.raises((MemoryError, StateError)) as raised,
    ):
        journey.load(folder)
    assert journey.load(folder).check()
    return str(raised.value)


def test_an_error_of_one_rank_that_asks_for_states_is_raised_on_all(found):
    assert found(2, "request") == ["rank 1: it failed", "it failed"]


def _fail_before_states_are_scattered(folder: Path) -> list[str]:
    """Fail in the first optimizer of one rank, in a group with the other rank or alone."""
    said = []
    for tp, sizes in ((1, [2, 2]), (2, [1, 2])):
        journey = Journey(GROUPED.but(tp=tp)).fill()
        assert [part.data_parallel_group.size() for part in journey.parts] in (sizes, sizes[:1])
        of_parts = [part.state_dict() for part in journey.parts]
        for part, state in zip(journey.parts, of_parts, strict=True):
            state["param_state"] = part.get_parameter_state_dp_zero()
            state["param_state_sharding_type"] = "dp_zero_gather_scatter"
        states = dict(enumerate(of_parts)) if len(of_parts) > 1 else of_parts[0]
        fails = torch.distributed.get_rank() == 1
        target = "moe_optim.checkpoint.param_groups.with_own_groups"
        with (
            mock.patch(target, side_effect=MemoryError("it failed")) if fails else nullcontext(),
            pytest.raises((MemoryError, StateError)) as raised,
        ):
            journey.optimizer.load_state_dict(states)
        journey.scramble().optimizer.load_state_dict(states)
        assert journey.check()
        said.append(str(raised.value))
    return said


def test_optimizers_that_communicate_in_different_groups_fail_together(found):
    first, second = found(2, "scattered")
    assert first == ["rank 1: it failed"] * 2
    assert second == ["it failed"] * 2


def _load_a_list_of_one_entry(folder: Path) -> str:
    journey, path = Journey(GROUPED).fill(), f"{folder}.pt"
    journey.optimizer.save_parameter_state(path)
    read = torch.load(path)
    torch.save(read[:1] if isinstance(read, list) else [read], path)
    with pytest.raises(LayoutError) as raised:
        journey.optimizer.load_parameter_state(path)
    return str(raised.value)


def test_a_file_of_torch_with_the_states_of_other_optimizers_is_refused(found):
    (said,) = found(1, "one entry")
    assert "expected states of" in said and "got a list of 1" in said


def _fail_to_read_what_is_kept(folder: Path) -> bool:
    """Fail to read a local checkpoint after its tensors; return whether nothing else changed."""
    from megatron.core.dist_checkpointing import tensor_aware_state_dict

    journey = Journey(GROUPED).fill().keep("atomic")
    before = [tensor.detach().clone() for tensor in journey.optimizer._tensors()]
    target = tensor_aware_state_dict.__name__ + ".apply_factory_merges"
    with mock.patch(target, side_effect=MemoryError), pytest.raises(MemoryError):
        journey.restore("atomic")
    after = list(journey.optimizer._tensors())
    require_loaded(lambda: after)
    return len(before) == len(after) > 0 and all(map(torch.equal, before, after))


def test_a_local_checkpoint_that_cannot_be_read_replaces_nothing(found):
    assert found(2, "kept") == [True, True]


def test_damage_that_one_rank_reads_is_raised_on_every_rank(found):
    for said in found(2, "one reads"):
        assert "Bad CRC-32" in said and ".distcp" in said


def _load_another_file(folder: Path) -> list[str]:
    """Exchange a data file for that of another save of the same layout.

    Also beside checksums as older versions have recorded them.
    """
    first, other, old = folder / "first", folder / "other", folder / "old"
    Journey(GROUPED).fill().save(first, RESHARDABLE)
    Journey(GROUPED).scramble().save(other, RESHARDABLE)
    shutil.copytree(first, old)
    record = old / CHECKSUM_MANIFEST
    content = json.loads(record.read_text())
    del content["archives"]
    content["tables"] = {}
    for name in {blob.file for blob in _blobs(old)}:
        digest = hashlib.sha256()
        with (old / name).open("rb") as file:
            for blob in _blobs(old):
                if blob.file == name:
                    rows = Archive(file_range(file, blob.start, blob.length)).rows()
                    digest.update(hashlib.sha256(rows).digest())
        content["tables"][name] = digest.hexdigest()
    record.write_text(json.dumps(content))
    assert list(corrupt_files(old)) == []
    assert Journey(GROUPED).scramble().load(old).check()
    for changed in (first, old):
        shutil.copy(other / "__0_0.distcp", changed / "__0_0.distcp")
    return [_said_of_load(GROUPED, changed) for changed in (first, old)]


def test_a_file_of_another_save_is_found_by_who_reads_it(found):
    ((said, beside_old),) = found(1, "another file")
    assert "it is another file" in said and "__0_0.distcp" in said
    assert "it is another file" in beside_old


def _load_beside_foreign_metadata(folder: Path) -> bool:
    """Load with another ``.metadata`` on the second rank's disk, which nobody vetted there."""
    from megatron.core import dist_checkpointing

    saved = folder / "saved"
    Journey(GROUPED).fill().save(saved, RESHARDABLE)
    torch.distributed.barrier()
    here = folder / str(torch.distributed.get_rank())
    shutil.copytree(saved, here)
    if here.name == "1":
        (here / ".metadata").write_bytes(pickle.dumps(Command(folder / "ran")))
    journey = Journey(GROUPED).scramble()
    state = journey.state(RESHARDABLE, is_loading=True)
    journey.optimizer.load_state_dict(dist_checkpointing.load(state, str(here))["optimizer"])
    assert journey.check()
    return (folder / "ran").exists()


def test_every_rank_unpickles_the_metadata_that_the_first_one_vetted(found):
    assert found(2, "metadata") == [False, False]


def _load_weights_beside_damage(folder: Path) -> list[str]:
    """Damage a moment; load weights alone, before and after a later save that did not finish."""
    saved = folder / "iter_0000001"
    Journey(GROUPED).fill().save(saved, RESHARDABLE)
    (blob, *_) = (blob for blob in _blobs(saved) if ".exp_avg." in blob.key)
    path = saved / blob.file
    path.write_bytes(flip(path.read_bytes(), blob.start + blob.length // 2, 0))
    said = []
    for later in (None, folder / "iter_0000002"):
        if later is not None:
            later.mkdir()
        try:
            Journey(GROUPED).load_weights(saved)
            said.append("loaded")
        except StateError as error:
            said.append(str(error))
    return said


def test_everything_is_read_first_where_the_last_save_did_not_finish(found):
    """Otherwise a rank reads, and so compares, what it loads alone."""
    ((before, after),) = found(1, "unfinished")
    assert before == "loaded"
    assert "exp_avg" in after and "Bad CRC-32" in after


def _count_copies(folder: Path) -> tuple[int, int, bool]:
    """Return the most chunks that a save holds, all chunks, and whether a master is copied."""
    import weakref

    from moe_optim.checkpoint import staging

    journey, stock = Journey(GROUPED).fill(), staging._on_host
    masters = {
        master.data_ptr() + at * 4
        for part in journey.parts
        for master in part.optimizer.state
        for at in range(master.numel())
    }
    held: list[weakref.ref[Any]] = []
    most, copied = 0, False

    def on_host(value: torch.Tensor) -> torch.Tensor:
        nonlocal most, copied
        made = stock(value)
        copied |= value.data_ptr() in masters and made.data_ptr() not in masters
        held.append(weakref.ref(made))
        most = max(most, sum(one() is not None for one in held))
        return made

    staging._on_host = on_host
    try:
        journey.save(folder, RESHARDABLE)
    finally:
        staging._on_host = stock
    assert Journey(GROUPED).scramble().load(folder).check()
    return most, len(held), copied


def test_a_synchronous_save_holds_two_chunks_and_copies_no_master(found):
    ((most, chunks, copied),) = found(1, "copies")
    assert most <= 2 < chunks
    assert not copied


def _count_copies_of_load(folder: Path) -> tuple[int, int, int]:
    """Load bf16 weights, masters and moments.

    Returns the most tensors in host memory of their own that were read and held at a time, and how
    many weights of experts there are, and were loaded in place.
    """
    import weakref

    from megatron.core import dist_checkpointing

    bf16 = Station(format="bf16")
    Journey(bf16).fill().save(folder, RESHARDABLE)
    journey, stock = Journey(bf16).scramble(), CheckedReader._memory_of
    held: list[weakref.ref[Any]] = []
    most = 0

    def memory_of(self: CheckedReader, blob: Blob) -> torch.Tensor | None:
        nonlocal most
        given = stock(self, blob)
        held.extend(weakref.ref(memory) for memory in self._memory if memory is not None)
        most = max(most, len({id(one()) for one in held if one() is not None}))
        return given

    with mock.patch.object(CheckedReader, "_memory_of", memory_of):
        state = journey.state(RESHARDABLE, is_loading=True)
        loaded = dist_checkpointing.load(state, str(folder))
    assert all(one() is None for one in held)  # nothing stays
    weights = {name: param for name, param in journey.model.named_parameters() if "experts" in name}
    in_place = sum(
        loaded["model"][name].data_ptr() == param.data_ptr() for name, param in weights.items()
    )
    for name, param in weights.items():
        assert torch.equal(param, journey.local_part(param).bfloat16()), name
    parts = journey.optimizer.chained_optimizers
    moments = [places_of_moments(part.optimizer) for part in parts]
    for part in parts:  # as Transformer Engine's Adam, which copies all states that it loads
        load = part.optimizer.load_state_dict
        part.optimizer.load_state_dict = lambda state, load=load: load(deepcopy(state))
    journey.optimizer.load_state_dict(loaded["optimizer"])
    assert [places_of_moments(part.optimizer) for part in parts] == moments
    assert journey.check()
    return most, len(weights), in_place


def places_of_moments(adam: torch.optim.Optimizer) -> list[int]:
    """Return the addresses of both moments of every master."""
    states = (adam.state[master] for group in adam.param_groups for master in group["params"])
    return [state[name].data_ptr() for state in states for name in ("exp_avg", "exp_avg_sq")]


def test_a_load_holds_a_chunk_per_reader_beside_the_tensors_that_it_reads_into(found):
    """Also where a weight is stored in parts: gate and up rows."""
    ((most, weights, in_place),) = found(1, "in place")
    assert 1 <= most <= _READERS
    assert in_place == weights > 0


def _exchanging() -> Any:
    """Return the strategy of ``--ckpt-fully-parallel-load``: each rank reads a share, and sends."""
    from megatron.core.dist_checkpointing.strategies.fully_parallel import (
        FullyParallelLoadStrategyWrapper,
    )
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy

    return FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy())


def _load_and_exchange(folder: Path) -> int:
    bf16 = Station(format="bf16")
    Journey(bf16).fill().save(folder, RESHARDABLE)
    journey = Journey(bf16).scramble().load(folder, sharded_strategy=_exchanging())
    for name, param in journey.model.named_parameters():
        assert torch.equal(param, journey.local_part(param).bfloat16()), name
    return journey.check()


def test_ranks_exchange_what_each_of_them_reads(found):
    assert all(found(2, "exchanged"))


def _fail_to_exchange(folder: Path) -> str:
    """Load one tensor, of which a single rank reads the only chunk, that is damaged."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    journey = Journey(Station(format="bf16")).scramble()
    weight = journey.model.decoder.layers[0].dense.weight
    replica = torch.distributed.get_rank()
    state = {"a": ShardedTensor.from_rank_offsets("a", weight.detach(), replica_id=replica)}
    if replica == 0:
        folder.mkdir()
    torch.distributed.barrier()
    dist_checkpointing.save(dict(state), str(folder))
    if replica == 0:
        (blob,) = (blob for blob in _blobs(folder) if blob.key == "a")
        path = folder / blob.file
        path.write_bytes(flip(path.read_bytes(), blob.start + blob.length // 2, 0))
    torch.distributed.barrier()
    with pytest.raises(StateError, match="Bad CRC-32"):
        dist_checkpointing.load(state, str(folder), _exchanging())
    with pytest.raises(StateError) as refusal:
        journey.optimizer.step()
    return str(refusal.value)


def test_a_rank_that_was_to_receive_what_another_failed_to_read_does_not_step(found):
    """It would wait for the other, which does not step."""
    assert all("that a failed load of" in said for said in found(2, "not exchanged"))


def test_memory_that_a_save_or_a_load_has_touched_can_be_freed(tmp_path):
    """As ``offload_to_cpu`` of DDP's buffers frees that of weights, on a CPU, too."""
    from moe_optim.checkpoint.staging import _on_host

    torch.save(torch.ones(4), tmp_path / "saved")
    weights = torch.arange(24.0)
    _on_host(weights[4:8])
    with (tmp_path / "saved").open("rb") as file:
        Archive(file).read_tensor("torch.float32", (4,), weights[:4])
    assert torch.equal(weights[:5], torch.tensor([1.0, 1.0, 1.0, 1.0, 4.0]))
    weights.untyped_storage().resize_(0)
    assert not weights.untyped_storage().nbytes()
