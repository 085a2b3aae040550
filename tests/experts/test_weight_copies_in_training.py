"""Training Transformer Engine's bf16 experts through copies is training values quantized by hand.

In Megatron's loop, on two ranks with several microbatches each; linears stand in, see
``te_experts``.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from moe_optim.calibration.fake_quantization import PER_EXPERT_GRIDS
from moe_optim.calibration.linears import grouped_linears
from moe_optim.config import MoEOptimConfig
from moe_optim.experts.weight_copies import WeightCopies
from moe_optim.formats import get_format
from moe_optim.optimizer.description import describe
from tests.support.bytes import assert_same_tensors
from tests.support.ranks import run_ranks
from tests.support.te.te_experts import build_with_te_experts
from tests.support.training import OVERLAP, Record, pretrain

STEPS = ["--train-iters", "4", "--eval-interval", "2"]  # evaluates in the middle and at the end
LINEARS = 2 * 2  # layers, linears of one
RECOMPUTE = ["--recompute-granularity", "full", "--recompute-method", "uniform"]
RECOMPUTE += ["--recompute-num-layers", "1"]
SELECTIVE = ["--recompute-granularity", "selective", "--recompute-modules", "moe"]
CUT = ["--expert-tensor-parallel-size", "2"]
"""Copies then need the amaxes of other ranks, in evaluations and recomputed layers, too."""
CASES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "mxfp4, overlapped": ("mxfp4", {}, OVERLAP),
    "nvfp4_rows, fused": ("nvfp4_rows", {"fuses": True}, OVERLAP),
    "mxfp4, all recomputed": ("mxfp4", {"fuses": True}, RECOMPUTE),
    "mxfp4, recomputed": ("mxfp4", {}, SELECTIVE),
    "int8_per_expert, cut": ("int8_per_expert", {"fuses": True}, [*CUT, *RECOMPUTE, *OVERLAP]),
}
ALWAYS = "mxfp4, overlapped"


def _train(
    flags: list[str], compute: str | None, options: dict[str, Any], calibrates: bool = False
) -> Record:
    """Train; ``extra`` holds how many copies there had been after every step, and what is said
    of weights. ``calibrates`` has the first step clip half of the range of every expert."""
    make, made, after_steps = WeightCopies._quantize, [], []

    def counting(*given: Any) -> Any:
        made.append(given)
        return make(*given)

    WeightCopies._quantize = counting
    config = MoEOptimConfig(format="bf16", compute=compute)
    if "by_hand" in options:
        name = options["by_hand"]
        options |= {"by_hand": PER_EXPERT_GRIDS.get(name) or get_format(name)}
    build_with_te_experts(config, **options)
    return pretrain(
        flags,
        config,
        after_step=lambda *_: after_steps.append(len(made)),
        after_setup=_calibrate if calibrates else None,
        observe=lambda *built: (after_steps, [row.unmanaged for row in describe(*built).weights]),
    )


def _calibrate(chunks: list[Any], _: Any) -> None:
    import moe_optim

    moe_optim.calibrate(chunks)
    for chunk in chunks:
        for _, linear in grouped_linears(chunk):
            amax = moe_optim.calibrated_amax(linear)
            moe_optim.set_calibrated_amax(linear, amax * 0.5)


@cache
def _by_hand(format: str, cut: tuple[str, ...]) -> list[Record]:
    return run_ranks(2, _train, [*STEPS, *cut], None, {"by_hand": format})


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.extended] * (case != ALWAYS)) for case in CASES]
)
def test_losses_and_weights_are_those_of_values_quantized_by_hand(case):
    """And each linear is copied once per step, however many microbatches read it."""
    format, options, flags = CASES[case]
    got = run_ranks(2, _train, [*STEPS, *flags], format, options)
    cut = tuple(word for word in flags if word in CUT)
    for mine, theirs in zip(got, _by_hand(format, cut), strict=True):
        assert len(mine.losses) == 4 and len(mine.validation_losses) >= 2
        assert mine.losses == theirs.losses
        assert mine.validation_losses == theirs.validation_losses
        assert_same_tensors(mine.weights, theirs.weights)
        made, said = mine.extra
        grown = [b - a for a, b in zip([0, *made], made, strict=False)]
        assert [grown[step] for step in (0, 1, 3)] == [LINEARS] * 3
        assert grown[2] > LINEARS  # an evaluation before it
        assert f"bf16 primary weights, multiplied in {format}" in said
        assert theirs.extra[0] == [0] * 4 and theirs.extra[1] != said


def test_calibrated_grids_train_as_by_hand_and_go_on_at_another_size(tmp_path: Path):
    """Two ranks share the experts, then each has all, whose gradients are summed otherwise.
    Checkpoints hold weights alone, under the names that they have without ``compute``."""
    grid, flags = "int8_per_expert", ["--eval-interval", "1000", *OVERLAP]
    flags += ["--train-iters", "4", "--dist-ckpt-optim-fully-reshardable"]
    shared = [*flags, "--expert-model-parallel-size", "2"]
    saving = [*shared, "--save", str(tmp_path), "--save-interval", "2"]
    got = run_ranks(2, _train, saving, grid, {"fuses": True}, True)
    want = run_ranks(2, _train, shared, None, {"by_hand": grid}, True)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    flags += ["--load", str(tmp_path)]
    resumed = run_ranks(2, _train, flags, grid, {"fuses": True})
    for mine, theirs in zip(got, want, strict=True):
        assert len(mine.losses) == 4 and mine.losses == theirs.losses
        assert_same_tensors(mine.weights, theirs.weights)
    assert len(resumed[0].losses) == 2
    assert resumed[0].losses[3] == got[0].losses[3]
