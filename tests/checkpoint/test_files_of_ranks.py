"""``--ckpt-format torch``: checksums of the files of all ranks, and their check at a load."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from moe_optim.checkpoint.files.checksum_manifest import CHECKSUM_MANIFEST
from moe_optim.checkpoint.integrity import checkpoint_defect, corrupt_files
from moe_optim.config import MoEOptimConfig
from tests.support.hostile.damage import flip_in_archive
from tests.support.ranks import run_ranks
from tests.support.training import pretrain

FLAGS = ["--ckpt-format", "torch", "--train-iters", "2", "--eval-interval", "1000"]
FOLDERS = ["mp_rank_00_000", "mp_rank_00_001"]
FILES = [
    f"{folder}/{name}.pt" for folder in FOLDERS for name in ("distrib_optim", "model_optim_rng")
]
DAMAGES: dict[str, Callable[[Path], object]] = {
    **{f"{name} flipped": lambda path, name=name: flip_in_archive(path / name) for name in FILES},
    "distrib_optim.pt is missing": lambda path: (path / FILES[0]).unlink(),
    "mp_rank_00_001/model_optim_rng.pt is missing": lambda path: shutil.rmtree(path / FOLDERS[1]),
    "no table of records at its end": lambda path: (path / FILES[3]).write_bytes(
        (path / FILES[3]).read_bytes()[:-100]
    ),
    "another file": lambda path: shutil.copy(
        path.with_name("iter_0000001") / FILES[2], path / FILES[2]
    ),
    "was not saved to the end": lambda path: shutil.copy(
        path.parent / "at the start", path / CHECKSUM_MANIFEST
    ),
}


def _save_and_load(root: Path) -> tuple[list[str | None], dict[str, str]]:
    """Save twice; return what the second folder looked like, and what loads of damaged ones say."""
    from megatron.training import checkpointing, training

    stock, seen = checkpointing.torch.save, []

    def look(state: Any, path: Any) -> None:
        folder = Path(path).parents[1]
        if torch.distributed.get_rank() == 0:
            seen.append(checkpoint_defect(folder))
            for manifest in folder.glob(CHECKSUM_MANIFEST):
                shutil.copy(manifest, root / "at the start")
        stock(state, path)

    def damage_and_load(chunks: list[Any], optimizer: Any) -> dict[str, str]:
        checkpointing.torch.save, args = stock, training.get_args()
        seen.append(checkpoint_defect(root / "iter_0000002"))
        return {name: _say(root, damage, args) for name, damage in {"": None, **DAMAGES}.items()}

    checkpointing.torch.save = look
    flags = [*FLAGS, "--save", str(root), "--save-interval", "1"]
    parallel = ["--expert-model-parallel-size", "2"]
    run = pretrain([*flags, *parallel], MoEOptimConfig(format="mxfp8"), observe=damage_and_load)
    return seen, run.extra


def _say(root: Path, damage: Callable[[Path], object] | None, args: Any) -> str:
    """Return what Megatron's loading says of a damaged copy, or the keys that it returned."""
    from megatron.training import checkpointing

    copy = root.with_name("damaged")
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(root, copy)
        if damage is not None:
            damage(copy / "iter_0000002")
    torch.distributed.barrier()
    try:
        state, *_ = checkpointing._load_base_checkpoint(str(copy), args)
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}"
    return " ".join(state)


def test_every_file_has_a_checksum_and_damage_is_refused_on_every_rank(tmp_path: Path):
    root = tmp_path / "checkpoints"
    results = run_ranks(2, _save_and_load, root)
    unfinished = "it was not saved to the end"
    assert results[0][0] == [*[unfinished] * 4, None], "two files of this rank, twice"
    for _, said in results:
        assert "optimizer" in said.pop("").split()
        assert said.keys() == DAMAGES.keys()
        for name, message in said.items():
            assert message.startswith("StateError: "), name
            assert name.removesuffix(" flipped") in message
            assert "iter_0000001 beside it" in message
    recorded = json.loads((root / "iter_0000002" / CHECKSUM_MANIFEST).read_text())
    assert sorted(recorded["archives"]) == FILES
    assert list(corrupt_files(root / "iter_0000002")) == []
