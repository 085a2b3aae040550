"""An asynchronous save holds the values of the call, whatever changes before they are written."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_optim.checkpoint.files.torch_dist import TorchDistReader
from tests.support.checkpoints.checkpoint_journey import Journey, Station, owned_states, run_once

BY_NAME, FLAT = "fully_reshardable", "dp_reshardable"
KNOBS: dict[str, dict[str, Any]] = {
    "bf16": {"format": "bf16", "biases": True},
    "mxfp8": {"format": "mxfp8", "fp32_dense": True},
    "nvfp4": {"format": "nvfp4"},  # with recorded amaxes
    "int4": {"format": "int4", "experts": "indexed"},
    "offloaded": {"format": "mxfp8", "knobs": (("offload_states", 0.5),)},
}
CASES = [f"{name} {sharding}" for name, sharding in product(KNOBS, (BY_NAME, FLAT))]


def _entries(state: Any) -> Iterator[Any]:
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import (
        LocalNonpersistentObject,
        ShardedTensor,
        apply_factories,
    )

    apply_factories(state)
    for entry in nested_values(state):
        if isinstance(entry, ShardedTensor) and not isinstance(entry, LocalNonpersistentObject):
            yield entry


def _save_and_change(name: str, folder: Path) -> tuple[int, set[str]]:
    """Change all tensors in place between the call and the writing.

    Returns how many elements of the checkpoint were compared with those of the call, and the keys
    of tensors that have other ones.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    case, sharding = name.split()
    journey = Journey(Station(**KNOBS[case])).fill()
    rank = torch.distributed.get_rank()
    state = journey.state(sharding)
    bias = torch.arange(64.0)  # as of a router: updated in place, in memory of its own
    state["model"]["bias"] = ShardedTensor.from_rank_offsets("bias", bias, replica_id=rank)
    live: list[Tensor] = [states[one] for part in journey.parts for *_, states in owned_states(part)
                          for one in states]  # fmt: skip
    want = []
    for entry in _entries(state):
        values = entry.make() if entry.data.is_meta else entry.data.detach()
        live.append(values)
        shape = (1,) * entry.prepend_axis_num + tuple(entry.local_shape)
        want.append((entry.key, entry.global_offset, values.clone().view(shape)))
    if rank == 0:
        folder.mkdir(parents=True)
    torch.distributed.barrier()
    later = {"async_sharded_save": True, "async_strategy": "mcore"}
    request = dist_checkpointing.save(state, str(folder), **later)
    for tensor in live:
        tensor.detach().fill_(-1.0)
    request.execute_sync()
    stored = TorchDistReader(folder)
    got = [stored.read_box(key, tuple(at), tuple(one.shape)) for key, at, one in want]
    pairs = zip(want, got, strict=True)
    return sum(map(torch.numel, got)), {
        key for (key, _, one), other in pairs if not torch.equal(one, other)
    }


def _save_twice(folder: Path) -> int:
    """Save one state before and after it changes; return how many elements were compared then."""
    from megatron.core import dist_checkpointing

    content = {"distrib_optim_sharding_type": BY_NAME, "chained_optim_avoid_prefix": True}
    later = {"async_sharded_save": True, "async_strategy": "mcore", "content_metadata": content}
    station = Station(format="bf16")
    journey = Journey(station).scramble()
    state = journey.state(BY_NAME)
    for name in ("first", "second"):
        dist_checkpointing.save(state, str(folder / name), **later).execute_sync()
        journey.fill()
    return Journey(station).scramble().load(folder / "second").check()


def _save_into_one_folder(folder: Path) -> list[int]:
    """End an asynchronous save behind another one, and behind a synchronous one, of its folder.

    Returns how many elements were compared once each of them had ended.
    """
    compared = []
    journey, later = Journey(Station()), {"async_sharded_save": True, "async_strategy": "mcore"}
    for name, more in (("asynchronous", later), ("synchronous", {})):
        first = journey.fill().save(folder / name, BY_NAME, **later)
        second = journey.save(folder / name, BY_NAME, **more)
        for request in filter(None, (second, first)):
            request.execute_sync()
            compared.append(Journey(Station()).scramble().load(folder / name).check())
    return compared


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function of ranks and a name, which gives what these ranks found."""
    jobs: dict[str, Callable[..., Any]] = {name: partial(_save_and_change, name) for name in CASES}
    jobs |= {"twice": _save_twice, "one folder": _save_into_one_folder}
    return run_once(tmp_path_factory.mktemp("later"), {2: jobs})


@pytest.mark.parametrize("name", CASES)
def test_a_step_before_the_writing_changes_nothing_that_is_written(saved, name):
    """Weights, biases, buffers, masters, moments and amaxes, in host memory of any kind."""
    for compared, torn in saved(2, name):
        assert compared
        assert torn == set()


def test_a_state_that_was_saved_is_saved_again_as_it_is_then(saved):
    assert all(saved(2, "twice"))


def test_unfinished_saves_into_one_folder_end_one_after_the_other(saved):
    for compared in saved(2, "one folder"):
        assert len(compared) == 3 and all(compared)
