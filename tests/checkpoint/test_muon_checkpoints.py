"""Checkpoints of Muon: masters and momentum go with their matrices to any size and layout."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from moe_optim.checkpoint.files.folders import TRACKER
from moe_optim.config import MoEOptimConfig
from tests.support.checkpoints.muon_journeys import (
    BY_NAME,
    Journey,
    assert_same_states,
    command_line,
    load_and_save,
    train_and_save,
)
from tests.support.ranks import run_ranks
from tests.support.states import given_values
from tests.support.training import OVERLAP, Record, assert_same_run, pretrain

pytestmark = pytest.mark.slow

GROUPED = MoEOptimConfig(format="bf16")
INDEXED = MoEOptimConfig(format="bf16", expert_layout="indexed")
STOCK_STEP = MoEOptimConfig(format="bf16", expert_layout="indexed", step="stock")
EXPERT_PARALLEL = ["--expert-model-parallel-size", "2"]
TENSOR_PARALLEL = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
UNDISTRIBUTED = ("--use-distributed-optimizer",)


# Resume

DENSE_FIRST = ["--moe-layer-freq", "([0]*1+[1]*1)"]
"""Two matrices of other shapes, so that shards end in gaps between matrices."""
SMALL_BUCKETS = [*OVERLAP, "--ddp-bucket-size", "10000"]
"""A bucket of one matrix, which the second rank owns."""


def _train(flags: list[str]) -> Record:
    flags = command_line([*DENSE_FIRST, "--train-iters", "4", *flags])
    return pretrain(flags, MoEOptimConfig(format="mxfp8"), observe=_gaps)


def _gaps(_model: list[Any], optimizer: Any) -> tuple[int, int]:
    """Return the elements of all saved buckets that belong to no matrix, and how many of this
    rank's shards have no matrix in front of the last one."""
    gaps = empty = 0
    for muon in (part for part in optimizer.chained_optimizers if hasattr(part, "matrices")):
        rank, ranks = muon.data_parallel_group.rank(), muon.data_parallel_group.size()
        for buffer, ranges in zip(muon.buffers, muon.gbuf_ranges, strict=True):
            for bucket, held in zip(buffer.buckets, next(iter(ranges.values())), strict=True):
                gaps += bucket.numel_unpadded - sum(param.numel() for param in bucket.params_list)
                start = rank * bucket.grad_data.numel() // ranks
                empty += not held["param_map"] and start < bucket.numel_unpadded
    return gaps, empty


@pytest.mark.parametrize(
    "flags",
    [
        SMALL_BUCKETS,
        pytest.param([BY_NAME, *SMALL_BUCKETS, *EXPERT_PARALLEL], marks=pytest.mark.extended),
        pytest.param(["--ckpt-format", "torch", *SMALL_BUCKETS], marks=pytest.mark.extended),
    ],
    ids=["dp_reshardable", "by name, experts apart", "torch"],
)
def test_resume_continues_to_the_bit(flags: list[str], tmp_path: Path):
    """Losses, masters, momentum and weights, where ranks own gaps between matrices or padding
    alone."""
    whole = run_ranks(2, _train, [*flags, "--save", str(tmp_path), "--save-interval", "2"])
    (tmp_path / TRACKER).write_text("2")
    rest = run_ranks(2, _train, [*flags, "--load", str(tmp_path)])
    assert whole[0].extra[0] > 0
    assert any(record.extra[1] for record in whole)
    for rank in range(2):
        assert set(rest[rank].losses) == {3, 4}
        whole[rank].losses = {step: whole[rank].losses[step] for step in rest[rank].losses}
        rest[rank].validation_losses = whole[rank].validation_losses
        assert_same_run(rest[rank], whole[rank], what=f"rank {rank}")


def _train_without_matrices(flags: list[str]) -> Record:
    given_values.when_built(_freeze_matrices)
    return pretrain(command_line(["--train-iters", "4", *flags]), GROUPED)


def _freeze_matrices(model: Any) -> None:
    kept = ("embedding", "output_layer")
    for name, param in model.named_parameters():
        param.requires_grad_(param.dim() == 1 or any(word in name for word in kept))


@pytest.mark.extended
def test_a_run_whose_matrices_are_all_frozen_resumes(tmp_path: Path):
    """It has no momentum, and its checkpoint is its own, not one of Adam."""
    saving = ["--save", str(tmp_path), "--save-interval", "2"]
    (whole,) = run_ranks(1, _train_without_matrices, saving)
    (tmp_path / TRACKER).write_text("2")
    (rest,) = run_ranks(1, _train_without_matrices, ["--load", str(tmp_path)])
    assert rest.losses == {step: whole.losses[step] for step in (3, 4)}


# Ours, at other sizes


@pytest.fixture(scope="module")
def ours(tmp_path_factory) -> tuple[Path, Record]:
    """Return a folder of checkpoints of two ranks with experts apart, and what the first saw."""
    folder = tmp_path_factory.mktemp("ours")
    record = run_ranks(2, train_and_save, EXPERT_PARALLEL, GROUPED, folder)[0]
    return folder, record


def travel(
    ranks: int, flags: list[str], config: MoEOptimConfig | None, sources: list[Path], to: Path
) -> Record:
    """Load every source and save it by name, compare the states with those saved by name where it
    came from, and return what a run saw that went on from the last."""
    journeys = [Journey(source, to / str(index)) for index, source in enumerate(sources)]
    record: Record = run_ranks(ranks, load_and_save, flags, config, journeys)[0]
    for journey in journeys:
        assert_same_states(journey.target, journey.source.parent / "named")
        shutil.rmtree(journey.target)
    assert set(record.losses) == {3, 4}
    return record


def test_experts_apart_change_their_layout_and_go_on_to_the_bit(ours, tmp_path):
    """From grouped weights to indexed ones, by name and bucket by bucket."""
    folder, want = ours
    sources = [folder / "named", folder / "flat"]
    got = travel(2, EXPERT_PARALLEL, INDEXED, sources, tmp_path)
    assert got.losses == {step: want.losses[step] for step in (3, 4)}


@pytest.mark.parametrize(
    ("ranks", "flags", "config"),
    [
        (3, SMALL_BUCKETS, GROUPED),
        pytest.param(2, TENSOR_PARALLEL, INDEXED, marks=pytest.mark.extended),
        pytest.param(
            2,
            [*TENSOR_PARALLEL, *EXPERT_PARALLEL, "--expert-tensor-parallel-size", "1"],
            MoEOptimConfig(format="mxfp8"),
            marks=pytest.mark.extended,
        ),
    ],
    ids=["3 ranks", "experts cut", "dense weights cut"],
)
def test_states_by_name_arrive_at_other_sizes(ours, ranks, flags, config, tmp_path):
    travel(ranks, flags, config, [ours[0] / "named"], tmp_path)


@pytest.mark.extended
def test_flat_states_arrive_at_another_number_of_ranks(tmp_path):
    run_ranks(2, train_and_save, [], GROUPED, tmp_path)
    travel(3, SMALL_BUCKETS, INDEXED, [tmp_path / "flat"], tmp_path / "anew")


# Stock's


@pytest.fixture(scope="module")
def stocks(tmp_path_factory) -> tuple[Path, Record]:
    """Return a folder of checkpoints of stock's Muon with the buffers of ``pretrain_gpt.py``, and
    what the first of two ranks saw."""
    folder = tmp_path_factory.mktemp("stock")
    return folder, run_ranks(2, train_and_save, [], None, folder)[0]


def test_checkpoints_of_stock_are_gone_on_from_to_the_bit(stocks, tmp_path):
    """Layer-wise states beside flat ones of Adam, and all by name."""
    folder, want = stocks
    assert want.classes == {"LayerWiseDistributedOptimizer", "DistributedOptimizer"}
    got = travel(2, [], STOCK_STEP, [folder / "named", folder / "flat"], tmp_path)
    assert got.classes == {"MuonDistributedOptimizer", "GroupedDistributedOptimizer"}
    assert got.losses == {step: want.losses[step] for step in (3, 4)}


@pytest.mark.extended
def test_checkpoints_of_stock_arrive_at_other_sizes(stocks, tmp_path):
    folder, _ = stocks
    config = MoEOptimConfig(format="mxfp8")
    travel(2, EXPERT_PARALLEL, config, [folder / "named", folder / "flat"], tmp_path)


def test_states_that_stock_saves_whole_are_gone_on_from_to_the_bit(stocks, tmp_path):
    """Adam's, too: of no distributed optimizer."""
    want = run_ranks(2, train_and_save, [], None, tmp_path, UNDISTRIBUTED, False)[0]
    shutil.rmtree(tmp_path / "named")
    (tmp_path / "named").symlink_to(stocks[0] / "named")  # the same values under other keys
    assert want.losses == stocks[1].losses
    got = travel(2, [], STOCK_STEP, [tmp_path / "flat"], tmp_path / "anew")
    assert got.losses == {step: want.losses[step] for step in (3, 4)}


def test_states_by_name_load_in_stock(ours, tmp_path):
    """Where expert parallelism is on both sides: else stock loads not even its own."""
    folder, want = ours
    got = travel(2, EXPERT_PARALLEL, None, [folder / "named"], tmp_path)
    assert got.classes == {"LayerWiseDistributedOptimizer", "DistributedOptimizer"}
    assert got.losses[3] == want.losses[3]  # Newton-Schulz of several matrices rounds otherwise


# Refusals


@pytest.mark.extended
def test_flat_states_of_adam_beside_stocks_muon_keep_their_tensor_parallel_size(stocks, tmp_path):
    with pytest.raises(AssertionError, match="--tensor-model-parallel-size: 1, here 2"):
        travel(2, TENSOR_PARALLEL, GROUPED, [stocks[0] / "flat"], tmp_path)


def test_states_of_adam_and_of_muon_are_told_apart(ours, tmp_path):
    """Muon's do not load into Adam; the other way is in ``test_state_kinds.py``."""
    with pytest.raises(AssertionError, match="expected Adam's optimizer states, got Muon's"):
        travel(2, [*EXPERT_PARALLEL, "--optimizer", "adam"], GROUPED, [ours[0] / "flat"], tmp_path)
