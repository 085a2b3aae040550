"""``--ckpt-format torch``: checksums of the files of all ranks, and their check at a load."""

import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_optim.checkpoint import loading
from moe_optim.checkpoint.files.folders import CHECKSUM_MANIFEST
from moe_optim.checkpoint.integrity import checkpoint_defect, corrupt_files
from moe_optim.checkpoint.sealing import record_checksums
from moe_optim.config import MoEOptimConfig
from moe_optim.errors import LayoutError, StateError
from tests.support.hostile.damage import flip_in_archive
from tests.support.ranks import run_ranks
from tests.support.training import pretrain

FLAGS = ["--ckpt-format", "torch", "--train-iters", "2", "--eval-interval", "1000"]
STEP = "--ckpt-step 1"
OTHER_MODEL, ONE_OTHER_MODEL = "another model", "another model of one rank"
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
    """Save twice; return what the second folder looked like, and what loads say.

    Loads are those of a copy, of damaged ones, and of one of another model.
    """
    from megatron.training import checkpointing, training

    stock, seen, masters = checkpointing.torch.save, [], []

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
        said = {name: _say(root, damage, args) for name, damage in {"": None, **DAMAGES}.items()}
        said[STEP] = _load_first(root, masters, chunks, optimizer)
        load = partial(_load_another_model, root, chunks, optimizer)
        return {**said, ONE_OTHER_MODEL: load(changed=1), OTHER_MODEL: load(changed=0)}

    def keep_masters(iteration: int, _: list[Any], optimizer: Any) -> None:
        if iteration == 1:
            masters.extend(master.clone() for master in _masters(optimizer))

    checkpointing.torch.save = look
    flags = [*FLAGS, "--save", str(root), "--save-interval", "1"]
    parallel = ["--expert-model-parallel-size", "2"]
    config = MoEOptimConfig(format="mxfp8")
    watched = {"observe": damage_and_load, "after_step": keep_masters}
    return seen, pretrain([*flags, *parallel], config, **watched).extra


def _masters(optimizer: Any) -> Iterator[torch.Tensor]:
    for part in optimizer.chained_optimizers:
        for group in part.shard_fp32_from_float16_groups:
            yield from group


def _load_first(root: Path, masters: list[torch.Tensor], chunks: list[Any], optimizer: Any) -> str:
    """Load the first of two checkpoints; return its iteration, if masters are those of it."""
    from megatron.training import training

    args = training.get_args()
    args.load, args.ckpt_step = str(root), 1
    iteration, _ = training.load_checkpoint(chunks, optimizer, None)
    args.ckpt_step = None
    is_same = all(map(torch.equal, _masters(optimizer), masters))
    return f"{iteration}" if is_same else "masters of another one"


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


def _load_another_model(root: Path, chunks: list[Any], optimizer: Any, changed: int) -> str:
    """Return what Megatron's loading says once one rank's file is of twice the experts."""
    from megatron.training import training

    rank, folder = torch.distributed.get_rank(), root / "iter_0000002"
    if rank == changed:
        path = folder / FOLDERS[rank] / "model_optim_rng.pt"
        state = torch.load(path, weights_only=False)
        state["args"].num_experts *= 2
        (name,) = (name for name in state["model"] if name.endswith("layers.0.mlp.router.weight"))
        state["model"][name] = state["model"][name].repeat(2, 1)
        torch.save(state, path)
        record_checksums(folder)
    torch.distributed.barrier()
    training.get_args().load = str(root)
    with pytest.raises(LayoutError) as raised:
        training.load_checkpoint(chunks, optimizer, None)
    with pytest.raises(StateError, match="that a failed load of"):
        optimizer.step()
    return str(raised.value)


def test_every_file_has_a_checksum_and_damage_is_refused_on_every_rank(tmp_path: Path):
    root = tmp_path / "checkpoints"
    results = run_ranks(2, _save_and_load, root)
    unfinished = "it was not saved to the end"
    assert results[0][0] == [*[unfinished] * 4, None], "two files of this rank, twice"
    for rank, (_, said) in enumerate(results):
        assert "optimizer" in said.pop("").split()
        assert said.pop(STEP) == "1", "Megatron takes the optimizer's states from the last one"
        for name in (OTHER_MODEL, ONE_OTHER_MODEL):
            other = said.pop(name)
            assert "model_optim_rng.pt: expected the tensors of this model" in other
            assert "(--num-experts: " in other
            assert other.startswith("rank 1: ") == (rank == 0 and name == ONE_OTHER_MODEL)
        assert said.keys() == DAMAGES.keys()
        for name, message in said.items():
            assert message.startswith("StateError: "), name
            assert name.removesuffix(" flipped") in message
            assert "iter_0000001 beside it" in message
    recorded = json.loads((root / "iter_0000002" / CHECKSUM_MANIFEST).read_text())
    assert sorted(recorded["archives"]) == FILES
    assert list(corrupt_files(root / "iter_0000002")) == []


def test_a_local_checkpoint_of_another_model_names_the_arguments_that_differ(monkeypatch):
    from megatron.training import global_vars

    class Manager:
        def load(self) -> tuple[Any, str]:
            args = SimpleNamespace(num_experts=8, hidden_size=64)
            return SimpleNamespace(common={"args": args}), "a local checkpoint"

    def stock(ddp_model: Any, optimizer: Any, scheduler: Any, checkpointing_context: Any) -> None:
        checkpointing_context["local_checkpoint_manager"].load()
        raise AssertionError("a shard id")

    here = SimpleNamespace(num_experts=4, hidden_size=64)
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", here)
    monkeypatch.setattr(loading, "original", lambda _: stock)
    context = {"local_checkpoint_manager": Manager()}
    with pytest.raises(LayoutError, match=r"a local checkpoint: .* a shard id.*num-experts: 8, he"):
        loading.load_checkpoint([], None, None, checkpointing_context=context)
    here.num_experts = 8
    with pytest.raises(AssertionError, match="a shard id"):
        loading.load_checkpoint([], None, None, checkpointing_context=context)
