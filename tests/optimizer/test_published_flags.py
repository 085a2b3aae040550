"""Flags that published recipes set with quantized weights: what they ask for holds here."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from moe_optim.config import MoEOptimConfig
from tests.support.ranks import run_ranks
from tests.support.training import OVERLAP, Record, assert_same_run, pretrain

pytestmark = pytest.mark.slow

SHARE = "--reuse-grad-buf-for-mxfp8-param-ag"
STEPS = ["--train-iters", "3", "--eval-interval", "2"]
MXFP8 = MoEOptimConfig(format="mxfp8")
SHARING = MoEOptimConfig(format="mxfp8", wire="bf16", layout="stock")
NARROW = "--use-precision-aware-optimizer --exp-avg-dtype {} --exp-avg-sq-dtype {}"
MOMENTS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}
extended = pytest.mark.extended


@cache
def trained(config: MoEOptimConfig, *flags: str) -> list[Record]:
    """Return what two ranks saw of 3 steps, made once and left alone by all."""
    return run_ranks(2, pretrain, [*STEPS, *flags], config)


def assert_same_end(rest: list[Record], whole: list[Record]) -> None:
    """The end of an interrupted run is that of a whole one, on every rank."""
    for rank, (got, want) in enumerate(zip(rest, whole, strict=True)):
        assert set(got.losses) == {3}
        end = replace(
            want,
            losses={step: want.losses[step] for step in got.losses},
            validation_losses=want.validation_losses[-len(got.validation_losses) :],
        )
        assert_same_run(got, end, what=f"rank {rank}")


@pytest.mark.parametrize(
    ("config", "overlap"),
    [
        pytest.param(MXFP8, OVERLAP, id="wire quantized, overlap"),
        pytest.param(SHARING, [], id="wire bf16", marks=extended),
    ],
)
def test_sharing_gradient_memory_changes_nothing(config, overlap, tmp_path):
    """A run with the flag, with evaluations, that was saved and resumed, is one without it."""
    flags = [*STEPS, *overlap, SHARE]
    run_ranks(2, pretrain, [*flags, "--save", f"{tmp_path}", "--exit-interval", "2"], config)
    rest = run_ranks(2, pretrain, [*flags, "--load", f"{tmp_path}"], config)
    assert_same_end(rest, trained(config, *overlap))


def _train_in_registered_memory(flags: list[str], config: MoEOptimConfig) -> Record:
    """Train with an allocator in the place of NCCL's; what comes with the record is the part of
    gradient and weight memory that was allocated with it."""
    from megatron.core import nccl_allocator

    counted: dict[str, int] = {}

    @contextmanager
    def registered(*_: Any, **__: Any) -> Iterator[None]:
        zeros = torch.zeros

        def counting(*args: Any, **kwargs: Any) -> torch.Tensor:
            made = zeros(*args, **kwargs)
            counted[made.data_ptr()] = made.nbytes
            return made

        torch.zeros = counting
        yield
        torch.zeros = zeros

    nccl_allocator.init = lambda: None
    nccl_allocator.create_nccl_mem_pool = lambda **_: None
    nccl_allocator.nccl_mem = registered

    def share(model: list[Any], _optimizer: Any) -> float:
        buffers = [*model[0].buffers, *model[0].expert_parallel_buffers]
        memory = [one for buffer in buffers for one in (buffer.grad_data, buffer.param_data)]
        return sum(counted.get(one.data_ptr(), 0) for one in memory) / sum(
            one.nbytes for one in memory
        )

    return pretrain([*flags, "--use-nccl-ub"], config, observe=share)


def test_bf16_weights_train_in_memory_that_nccl_has_registered():
    """All of their buffers lie in it, and the run is the one without."""
    config = MoEOptimConfig(format="bf16", step="fused")
    runs = run_ranks(2, _train_in_registered_memory, [*STEPS, *OVERLAP], config)
    for got, want in zip(runs, trained(config, *OVERLAP), strict=True):
        assert got.extra == 1
        assert_same_run(got, want, what="with --use-nccl-ub")


@pytest.mark.parametrize(
    ("dtypes", "config", "flags"),
    [
        pytest.param(("bf16", "bf16"), MXFP8, OVERLAP, id="bf16"),
        pytest.param(
            ("fp8", "fp16"),
            MoEOptimConfig(format="nvfp4", expert_layout="indexed"),
            ["--dist-ckpt-optim-fully-reshardable"],
            id="fp8 and fp16, fully reshardable",
            marks=extended,
        ),
        pytest.param(
            ("fp16", "bf16"),
            SHARING,
            ["--ckpt-format", "torch", "--main-grads-dtype", "bf16"],
            id="legacy, gradients in bf16",
            marks=extended,
        ),
    ],
)
def test_narrow_moments_train_and_resume_to_the_bit(dtypes, config, flags, tmp_path):
    """Masters stay in fp32, moments are held as asked, and a checkpoint has what they stand for."""
    flags = [*flags, *NARROW.format(*dtypes).split()]
    whole = trained(config, *flags)
    for record in whole:
        assert {master.dtype for master in record.masters.values()} == {torch.float32}
        for moments in record.moments.values():
            assert [moments[name].dtype for name in ("exp_avg", "exp_avg_sq")] == [
                MOMENTS[dtype] for dtype in dtypes
            ]
    flags = [*STEPS, *flags]
    run_ranks(2, pretrain, [*flags, "--save", f"{tmp_path}", "--exit-interval", "2"], config)
    rest = run_ranks(2, pretrain, [*flags, "--load", f"{tmp_path}"], config)
    assert_same_end(rest, whole)
