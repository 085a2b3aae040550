"""Muon in the topologies and models that Adam trains: each matrix is stepped by one rank, whole."""

import shlex
from collections.abc import Callable
from typing import Any

import pytest

from moe_optim.config import MoEOptimConfig
from moe_optim.integration.agreement import gather_objects
from tests.support.ranks import run_ranks
from tests.support.states import given_values
from tests.support.states.masters import assert_weights_come_from_masters
from tests.support.training import OVERLAP, pretrain

pytestmark = pytest.mark.slow

RUN = shlex.split("""
--optimizer muon --train-iters 3 --eval-interval 2 --clip-grad 1.0 --log-num-zeros-in-grad
""")
PP2 = "--pipeline-model-parallel-size 2"
EP2 = "--expert-model-parallel-size 2"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel --moe-ffn-hidden-size 128"
VIRTUAL = f"{PP2} --num-layers 4 --num-virtual-stages-per-pipeline-rank 2"
SHARED = "--moe-shared-expert-intermediate-size 96"
RUNS: dict[str, tuple[int, str, str]] = {  # ranks, format, flags
    "experts over 2 ranks, twice": (4, "fp8_block", EP2),
    "virtual stages": (2, "mxfp8", VIRTUAL),
    "more ranks than matrices": (8, "mxfp8", "--num-layers 1 --global-batch-size 8"),
    "stages of experts": (4, "mxfp8", f"{PP2} {EP2}"),
    "cut experts, distributed": (2, "mxfp8", f"{TP2} --muon-tp-mode distributed"),
    "cut dense weights, duplicated": (
        4,
        "fp8_block",
        f"{TP2} --expert-tensor-parallel-size 1 {EP2} --muon-tp-mode duplicated",
    ),
    "shared experts, cut": (2, "mxfp8", f"{TP2} {SHARED} --muon-tp-mode duplicated"),
    "shared experts with a gate": (2, "nvfp4", f"{SHARED} --moe-shared-expert-gate"),
    "next tokens": (2, "mxfp8", f"--mtp-num-layers 1 {EP2}"),
    "a dense layer first": (2, "mxfp8", f"--moe-layer-freq [0,1] {PP2}"),
    "gates in attention": (2, "mxfp8", "--attention-output-gate --qk-layernorm"),
    "gradients reduced in bf16": (2, "mxfp8", "--grad-reduce-in-bf16"),
}
BRIEF = ("experts over 2 ranks, twice", "virtual stages")


def _train(flags: list[str], format: str, without: list[str]) -> Any:
    return pretrain(
        [*RUN, *OVERLAP, *flags],
        MoEOptimConfig(format=format, step="fused"),
        observe=_assert_is_as_it_should,
        without=without,
    )


def _assert_is_as_it_should(model: list[Any], optimizer: Any) -> None:
    assert_weights_come_from_masters(model, optimizer)
    parts = [part for part in optimizer.chained_optimizers if hasattr(part, "matrices")]
    names = [weight.name for part in parts for weight in part.matrices.values()]
    assert any(gather_objects(names, None))  # a rank may own none
    assert not any("embedding" in name or "bias" in name for name in names)


def _assert_trains(ranks: int, format: str, flags: list[str], without: list[str]) -> None:
    records = run_ranks(ranks, _train, flags, format, without)
    assert "MuonDistributedOptimizer" in records[0].classes
    last = records[-1].losses
    assert sorted(last) == [1, 2, 3]
    assert last[3] < last[1]
    for record in records:
        assert record.norms == records[0].norms  # all ranks clip alike


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.extended] * (name not in BRIEF)) for name in RUNS],
)
def test_weights_of_all_ranks_come_from_masters(name: str):
    """Every quantized byte on every rank is that of the whole masters; losses fall."""
    ranks, format, flags = RUNS[name]
    _assert_trains(ranks, format, shlex.split(flags), [])


# Frozen parameters


def _is_matrix(name: str, param: Any) -> bool:
    return param.dim() > 1 and "embedding" not in name and "output_layer" not in name


FROZEN: dict[str, tuple[str, Callable[[Any, str, Any], bool], list[int]]] = {
    "experts with ranks of their own": (EP2, lambda _, name, __: "experts" in name, [3, 3]),
    "all but experts": ("", lambda _, name, __: "experts" not in name, [2, 2]),
    "all that Adam steps": ("", lambda _, name, param: not _is_matrix(name, param), [5, 5]),
    "all matrices": ("", lambda _, name, param: _is_matrix(name, param), []),
    "matrices of a stage": (
        PP2,
        lambda model, name, param: model.pre_process and _is_matrix(name, param),
        [0, 5],
    ),
    "a stage": (PP2, lambda model, _, __: model.pre_process, [0, 5]),
}
"""Flags, whether a parameter of a model is frozen, and the matrices' parameters on each rank."""


def _train_frozen(flags: list[str], name: str, step: Any) -> tuple[Any, int | None]:
    _, is_frozen, _ = FROZEN[name]
    before: dict[str, Any] = {}

    def freeze(model: Any) -> None:
        for parameter, param in model.named_parameters():
            param.requires_grad_(not is_frozen(model, parameter, param))

    def keep(model: list[Any], _: Any) -> None:
        before.update(
            (name, param.detach().float().clone()) for name, param in model[0].named_parameters()
        )

    def count(model: list[Any], optimizer: Any) -> int | None:
        for parameter, param in model[0].named_parameters():
            moved = not before[parameter].equal(param.detach().float())
            assert moved is param.requires_grad, parameter
        counts = [
            len(part.matrices) for part in optimizer.chained_optimizers if hasattr(part, "matrices")
        ]
        return sum(counts) if counts else None

    given_values.when_built(freeze)
    record = pretrain(
        [*RUN, *flags],
        MoEOptimConfig(format="mxfp8", step=step),
        observe=count,
        after_setup=keep,
    )
    return record.losses, record.extra


@pytest.mark.parametrize("step", ["fused", pytest.param("stock", marks=pytest.mark.extended)])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.extended] * (name != "matrices of a stage"))
        for name in FROZEN
    ],
)
def test_what_is_frozen_stays_and_all_else_moves(name: str, step: str):
    """Ranks without a matrix, and models without a parameter for one of both optimizers, train."""
    flags, _, matrices = FROZEN[name]
    found = run_ranks(2, _train_frozen, shlex.split(flags), name, step)
    assert [count for _, count in found if count is not None] == matrices
    assert sorted(found[-1][0]) == [1, 2, 3]
