"""The common state, which Megatron reads first: no other is taken for it, no damage goes unseen."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_optim.checkpoint.files.folders import CHECKSUM_MANIFEST, COMMON_FILE
from moe_optim.checkpoint.sealing import invalidate, record_checksums
from moe_optim.errors import StateError
from tests.support.checkpoints.checkpoint_journey import Journey, Station, run_once
from tests.support.hostile.damage import flip_in, flip_in_archive
from tests.support.hostile.hostile_checkpoints import rewrite

RESHARDABLE = "fully_reshardable"


def _load(folder: Path) -> str:
    try:
        return f"{Journey(Station()).scramble().load(folder).check()} elements"
    except StateError as error:
        return str(error)


def _common_state(folder: Path) -> Any:
    from megatron.core import dist_checkpointing

    return dist_checkpointing.load_common_state_dict(str(folder))


def _write_beside(folder: Path, other: dict[str, Any]) -> None:
    torch.save(other, folder / COMMON_FILE)


def _link_beside(folder: Path, other: dict[str, Any]) -> None:
    torch.save(other, folder.parent / "outside.pt")
    (folder / COMMON_FILE).symlink_to(folder.parent / "outside.pt")


def _load_beside_another(folder: Path, put: Callable[[Path, dict[str, Any]], None]) -> list[str]:
    Journey(Station()).fill().save(folder, RESHARDABLE)
    put(folder, {**_common_state(folder), "iteration": 77})
    seen = [_load(folder)]
    invalidate(folder)  # as a save over it does
    return [*seen, str((folder / COMMON_FILE).exists())]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function of ranks and a name, which gives what these ranks found."""
    jobs = {
        "a file": partial(_load_beside_another, put=_write_beside),
        "a link": partial(_load_beside_another, put=_link_beside),
        "older": _load_as_older_megatrons_save,
    }
    return run_once(tmp_path_factory.mktemp("common"), {1: jobs, 2: {"": _load_from_own_disks}})


@pytest.mark.parametrize("put", ["a file", "a link"])
def test_a_common_file_of_another_save_is_refused_and_removed_by_the_next_save(put, found):
    """Megatron prefers it to the common state of this save."""
    ((said, is_left),) = found(1, put)
    assert f"{COMMON_FILE} is of another save" in said and "remove it" in said
    assert is_left == "False"


def _load_as_older_megatrons_save(folder: Path) -> dict[str, str]:
    Journey(Station()).fill().save(folder, RESHARDABLE)
    common, file = _common_state(folder), folder / COMMON_FILE
    rewrite(folder, drop="common_state/shard_0_1")
    torch.save(common, file)
    (folder / CHECKSUM_MANIFEST).unlink()
    said = {"unrecorded": _load(folder)}
    record_checksums(folder)
    said["recorded"], content = _load(folder), file.read_bytes()
    flip_in_archive(file)
    said["flipped"] = _load(folder)
    torch.save({**common, "iteration": 77}, file)
    said["another"] = _load(folder)
    file.write_bytes(content)
    return said


def test_a_common_file_of_older_megatrons_is_compared_with_its_checksums(found):
    (said,) = found(1, "older")
    assert said["unrecorded"].endswith("elements") and said["recorded"] == said["unrecorded"]
    assert COMMON_FILE in said["flipped"] and "Bad CRC-32" in said["flipped"]
    assert COMMON_FILE in said["another"] and "it is another file" in said["another"]


def _load_from_own_disks(folder: Path) -> str:
    """Damage the common state on the second rank's disk alone."""
    saved, rank = folder / "saved", torch.distributed.get_rank
    Journey(Station()).fill().save(saved, RESHARDABLE)
    torch.distributed.barrier()
    here = folder / str(rank())
    shutil.copytree(saved, here)
    if rank() == 1:
        flip_in(here, "common_state")
    try:
        Journey(Station()).scramble().load_weights(here)
    except StateError as error:
        return str(error)
    return "loaded"


def test_a_common_state_that_is_damaged_for_one_rank_is_raised_on_every_rank(found):
    for said in found(2, ""):
        assert "common_state" in said and "Bad CRC-32" in said
