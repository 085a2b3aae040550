"""Training with Muon through Megatron's own loop: what must hold to the bit."""

import shlex
from dataclasses import replace
from typing import Any

import pytest

from moe_optim.config import MoEOptimConfig
from tests.optimizer.test_ten_rows import by_expert
from tests.support.ranks import run_ranks
from tests.support.states.masters import assert_weights_come_from_masters
from tests.support.training import OVERLAP, Record, assert_same_tensors, pretrain
from tests.support.training_runs.stock_muon import gather_uneven_parts

pytestmark = pytest.mark.slow

RUN = ["--optimizer", "muon", "--train-iters", "3", "--eval-interval", "2"]
UNEVALUATED = ["--eval-interval", "1000"]
BF16 = MoEOptimConfig(format="bf16", expert_layout="indexed", step="stock")
"""One parameter per expert, as stock's Muon needs."""
EP2 = ["--expert-model-parallel-size", "2"]
TP2 = shlex.split("--tensor-model-parallel-size 2 --sequence-parallel")
OTHER = shlex.split("""
--muon-nesterov --muon-scale-mode unit_rms_norm --muon-num-ns-steps 3 --muon-no-split-qkv
--muon-coefficient-type polar_express --muon-extra-scale-factor 0.2 --muon-momentum 0.4
""")
CLASSES = {"MuonDistributedOptimizer", "GroupedDistributedOptimizer"}


def _train(flags: list[str], config: MoEOptimConfig, is_ours: bool = True) -> Record:
    gather_uneven_parts()
    check = assert_weights_come_from_masters if is_ours and config.step != "stock" else None
    return pretrain([*RUN, *flags], config, optimizer=is_ours, observe=check)


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(
            [*OVERLAP, *EP2, *OTHER, "--muon-fp32-matmul-prec", "high"],
            id="overlaps, expert parallel, other settings in fp32",
        ),
        pytest.param([], id="settings as they are", marks=pytest.mark.extended),
        pytest.param(
            [*TP2, "--muon-tp-mode", "duplicated"],
            id="tensor parallel, duplicated",
            marks=pytest.mark.extended,
        ),
        pytest.param(
            [*TP2, "--muon-tp-mode", "distributed"],
            id="tensor parallel, distributed",
            marks=pytest.mark.extended,
        ),
        pytest.param(
            [*TP2, "--muon-tp-mode", "blockwise", "--expert-tensor-parallel-size", "1"],
            id="tensor parallel, blockwise",
            marks=pytest.mark.extended,
        ),
    ],
)
def test_stock_step_equals_megatrons_muon(flags: list[str]):
    """With bf16 weights and no clipping, losses and weights on 2 ranks are stock's to the bit."""
    stock = run_ranks(2, _train, flags, BF16, False)
    ours = run_ranks(2, _train, flags, BF16)
    for rank in range(2):
        assert stock[rank].classes.isdisjoint(CLASSES)
        assert ours[rank].classes == CLASSES
        assert len(ours[rank].losses) == 3
        assert ours[rank].losses == stock[rank].losses
        assert ours[rank].validation_losses == stock[rank].validation_losses
        assert_same_tensors(ours[rank].weights, stock[rank].weights, what=f"rank {rank}")


@pytest.mark.extended
def test_stock_step_equals_replicated_muon():
    """Without --use-distributed-optimizer, stock steps every matrix on every rank; here a matrix
    has one owner, and the bits are the same."""
    flags = ["--use-distributed-optimizer"]
    stock = run_ranks(2, _train_replicated, flags)
    ours = run_ranks(2, _train, [], BF16)
    for rank in range(2):
        assert ours[rank].losses == stock[rank].losses
        assert_same_tensors(ours[rank].weights, stock[rank].weights, what=f"rank {rank}")


def _train_replicated(without: list[str]) -> Record:
    return pretrain(RUN, BF16, optimizer=False, without=without)


@pytest.mark.parametrize(
    "format",
    [
        "nvfp4",
        pytest.param("fp8_block", marks=pytest.mark.extended),
        pytest.param("nvfp4_rows", marks=pytest.mark.extended),
    ],
)
def test_wires_layouts_and_workspaces_agree(format: str):
    """Quantized bytes and bf16 on the wire, one weight for all experts and one for each, one batch
    and many: losses, and the bytes of every weight, are the same on 2 ranks, which evaluate between
    steps and overlap gathers."""
    base = MoEOptimConfig(format=format)
    other = replace(base, wire="bf16", muon_workspace_mib=1, expert_layout="indexed")
    expected, found = (run_ranks(2, _train, OVERLAP, config) for config in (base, other))
    for got, want in zip(found, expected, strict=True):
        assert got.losses == want.losses
        assert got.validation_losses == want.validation_losses
        assert_same_tensors(by_expert(got.weights), by_expert(want.weights), what="weight")


def _shapes_of_gate_and_up(flags: list[str], config: MoEOptimConfig) -> Any:
    def count(_model: Any, optimizer: Any) -> dict[str, list[int]]:
        return {
            weight.name: [rows.rows for rows in weight.rows]
            for part in optimizer.chained_optimizers
            for weight in getattr(part, "matrices", {}).values()
        }

    return pretrain([*RUN, *flags], config, observe=count)


def test_gate_and_up_are_orthogonalized_apart_on_request():
    """An fc1 of 192 rows is two matrices of 96, whose rows alternate in blocks of 32; other weights
    are one, but for queries, keys and values, which are always apart."""
    flags = ["--moe-mlp-glu-interleave-size", "32", "--train-iters", "2", *UNEVALUATED]
    config = MoEOptimConfig(format="fp8_block", muon_gate_up="apart")
    (apart,) = run_ranks(1, _shapes_of_gate_and_up, flags, config)
    others = {name: rows for name, rows in apart.extra.items() if "linear_fc1" not in name}
    assert len(apart.extra) - len(others) == 2
    assert all(rows == [96, 96] for name, rows in apart.extra.items() if name not in others)
    qkv = [rows for name, rows in others.items() if "qkv" in name]
    assert qkv == [[64, 64, 64]] * 2
    assert all(len(rows) == 1 for name, rows in others.items() if "qkv" not in name)


def _workspaces(flags: list[str], config: MoEOptimConfig) -> Any:
    def count(_model: Any, optimizer: Any) -> tuple[int, int]:
        parts = [part for part in optimizer.chained_optimizers if hasattr(part, "matrices")]
        chunks = [chunk for part in parts for chunk in part._tables[None].chunks]
        memory = [one.untyped_storage() for chunk in chunks for one in chunk.places.tensors]
        return len(parts), sum({one.data_ptr(): one.nbytes() for one in memory}.values())

    return pretrain([*RUN, *flags, "--train-iters", "1", *UNEVALUATED], config, observe=count).extra


def test_dense_matrices_and_experts_share_a_workspace():
    """The knob bounds the memory of both optimizers together."""
    config = MoEOptimConfig(format="mxfp8", muon_workspace_mib=4)
    for parts, nbytes in run_ranks(2, _workspaces, [*EP2, "--hidden-size", "256"], config):
        assert parts == 2
        assert 2 << 20 < nbytes <= 4 << 20


def test_a_matrix_that_does_not_fit_is_refused_on_every_rank():
    """Not by its owner alone, for which the others would wait."""
    flags = [*RUN, "--hidden-size", "256", "--num-layers", "1"]
    config = MoEOptimConfig(format="mxfp8", muon_workspace_mib=1)
    with pytest.raises(AssertionError) as caught:
        run_ranks(2, pretrain, flags, config)
    _, *of_ranks = str(caught.value).split("--- rank")
    assert len(of_ranks) == 2
    for told in of_ranks:
        assert "ConfigError: muon_workspace_mib: expected at least 4 for decoder.layers.0" in told
