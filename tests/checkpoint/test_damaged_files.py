"""A damaged checkpoint is refused, by the name of its file, or loads to the bit what was saved."""

import random
import shutil
from collections import Counter

import pytest
from torch.distributed.checkpoint import CheckpointException

from moe_optim.checkpoint.integrity import corrupt_files
from moe_optim.checkpoint.sealing import record_checksums
from tests.support.hostile.damage import (
    ANY_ARCHIVE,
    KINDS,
    SAME_LAYOUT,
    Loader,
    damages,
    files_of,
    flip,
    save_legacy,
    save_with_megatron,
)
from tests.support.ranks import run_ranks
from tests.support.training_runs.runs import write_checkpoint

ITERATIONS = (10, 20)
FIRST, SECOND = (f"iter_{iteration:07d}" for iteration in ITERATIONS)
RECORDED = ("recorded", "with a manifest", "legacy, recorded")
UNRECORDED = {"plain": SAME_LAYOUT, "of torch alone": SAME_LAYOUT, "legacy": ANY_ARCHIVE}
"""And what cannot be found of each."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Every kind of checkpoint, twice: of the same layout, with other values."""
    root = tmp_path_factory.mktemp("saved")
    for name, verify in (("plain", False), ("with a manifest", True)):
        (root / name).mkdir()
        run_ranks(1, save_with_megatron, root / name, ITERATIONS, verify)
    save_legacy(root / "legacy", ITERATIONS)
    for iteration in ITERATIONS:
        write_checkpoint(root / "of torch alone", iteration)
    for name, recorded in (("plain", "recorded"), ("legacy", "legacy, recorded")):
        shutil.copytree(root / name, root / recorded)
        for checkpoint in (root / recorded).iterdir():
            record_checksums(checkpoint)
    return root


def check_damages(saved, name: str, count: int, seed: int) -> Counter[str]:
    """Return how often each kind of damage was found; one that is not must change nothing."""
    checkpoint, other = saved / name / FIRST, saved / name / SECOND
    kinds = [kind for kind in KINDS if kind not in UNRECORDED.get(name, ())]
    loader, found = Loader(checkpoint), Counter()
    for number, (kind, paths) in enumerate(damages(checkpoint, other, kinds, count, seed)):
        what = f"{name}: {[path.name for path in paths]} {kind}, damage {number} of seed {seed}"
        defects = "; ".join(str(defect) for defect in corrupt_files(checkpoint))
        if defects:
            found[kind] += 1
            speaks_of_others = any(path.suffix == ".json" for path in paths)
            if name in RECORDED and not speaks_of_others:
                assert any(path.name in defects for path in paths), f"{what}: {defects}"
            continue
        try:
            assert loader.loads_the_same(checkpoint), f"{what}: loaded unseen"
        except (Exception, CheckpointException) as error:  # what only the loader knows
            is_absent = kind == "deleted" and paths[0].name in str(error)  # a file that it needs
            is_renamed = paths[0].name == ".metadata"  # a key that it needs
            assert name in UNRECORDED and (is_absent or is_renamed), what
    assert not list(corrupt_files(checkpoint))
    return found


@pytest.mark.parametrize("name", [*RECORDED, *UNRECORDED])
def test_no_damage_is_loaded_unseen(saved, name):
    found = check_damages(saved, name, 50, seed=0)
    assert {"truncated", "empty", "overwritten"} <= set(found)


def check_flips(saved, name: str, share: float) -> Counter[str]:
    """Flip one bit of a share of all bytes of a checkpoint, and count what comes of it."""
    checkpoint, rng, outcome = saved / name / FIRST, random.Random(0), Counter()
    loader = Loader(checkpoint)
    for path in files_of(checkpoint):
        content = path.read_bytes()
        for position in rng.sample(range(len(content)), int(share * len(content))):
            path.write_bytes(flip(content, position, rng.randrange(8)))
            if next(corrupt_files(checkpoint), None) is not None:
                outcome["found"] += 1
                continue
            try:
                same = loader.loads_the_same(checkpoint)
            except (Exception, CheckpointException):
                assert name in UNRECORDED and path.name == ".metadata"  # a key of another name
                outcome["refused by the loader"] += 1
            else:
                assert same, f"{path.name}, byte {position}: loaded unseen"
                outcome["harmless"] += 1
        path.write_bytes(content)
    return outcome


def test_no_flipped_bit_is_loaded_unseen_even_if_nothing_was_recorded(saved):
    outcome = check_flips(saved, "plain", 0.01)
    assert outcome["found"] > 0.5 * outcome.total()


def test_a_manifest_finds_every_flipped_bit(saved):
    """Nothing is harmless to a SHA-256."""
    outcome = check_flips(saved, "with a manifest", 0.01)
    assert outcome["found"] == outcome.total()
