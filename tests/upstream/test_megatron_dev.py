"""Megatron's dev branch: quantized experts resume, also on fewer ranks, and Muon has its buffers.

Runs where a checkout of it comes first on ``PYTHONPATH``: it names itself core 0.19.0.
"""

from pathlib import Path
from typing import Any

import pytest

from moe_optim.config import MoEOptimConfig
from moe_optim.integration.engine import patch_state
from moe_optim.integration.patches import PATCHES
from tests.support.bytes import assert_same_tensors
from tests.support.ranks import on_ranks, run_ranks
from tests.support.training import Record, assert_same_run, pretrain

OPTIMIZER = pytest.importorskip("megatron.core.optimizer").OptimizerConfig
pytestmark = pytest.mark.skipif(
    not hasattr(OPTIMIZER, "chunked_optimizer_state_offload"),
    reason="PYTHONPATH names no dev branch of Megatron",
)
FLAGS = ["--eval-interval", "100", "--dist-ckpt-optim-fully-reshardable"]
STEPS, SAVED = 4, 2


def _train(flags: list[str]) -> Record:
    """Return what a rank saw, with the weights that it began with."""
    from moe_optim import export_weights

    first: dict[str, Any] = {}

    def note(chunks: list[Any], _: Any) -> None:
        first.update({name: weight.clone() for name, weight in export_weights(chunks)})

    return pretrain(
        [*FLAGS, *flags],
        MoEOptimConfig(format="mxfp8_2d"),
        observe=lambda *_: first,
        after_setup=note,
    )


@on_ranks(1)
def test_every_replaced_name_fits():
    assert not [patch.id for patch in PATCHES if patch_state(patch).startswith("broken")]


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_quantized_experts_resume_to_the_bit_also_on_one_rank(optimizer: str, tmp_path: Path):
    """One rank begins with the weights that two begin with, and steps."""
    flags = ["--optimizer", optimizer, "--train-iters", str(STEPS)]
    saves = ["--save", str(tmp_path), "--save-interval", str(SAVED)]
    whole = run_ranks(2, _train, [*flags, *saves])
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(str(SAVED))
    resumed = run_ranks(2, _train, [*flags, "--load", str(tmp_path)])
    (alone,) = run_ranks(1, _train, [*flags, "--load", str(tmp_path)])
    for rank in range(2):
        left = {step: loss for step, loss in whole[rank].losses.items() if step > SAVED}
        whole[rank].losses, whole[rank].norms = left, resumed[rank].norms
        assert_same_run(resumed[rank], whole[rank], what=f"rank {rank}")
    assert_same_tensors(alone.extra, resumed[0].extra, what="weights")
    assert alone.losses.keys() == resumed[0].losses.keys()


@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        ("--chunked-optimizer-state-offload", "Set offload_states"),
        ("--disable-grad-buffers-cpu-backup", "bytes in that memory"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(flag: str, reason: str):
    with pytest.raises(AssertionError, match=rf"{flag}.*{reason}"):
        run_ranks(1, _train, [flag, "--train-iters", "1"])
