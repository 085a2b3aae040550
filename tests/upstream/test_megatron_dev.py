"""Megatron's dev branch: quantized experts resume, also on fewer ranks, with Adam and with Muon.

Runs where a checkout of it comes first on ``PYTHONPATH``: it names itself core 0.19.0.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from moe_optim.config import MoEOptimConfig
from moe_optim.integration.engine import patch_state
from moe_optim.integration.patches import PATCHES
from moe_optim.weights.names import parameter_names
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
    """Return what a rank saw, with the masters and moments that it began with."""
    first: dict[str, torch.Tensor] = {}

    def note(_: list[Any], optimizer: Any) -> None:
        from moe_optim.optimizer.address_book import owned_masters

        for part in optimizer.chained_optimizers:
            names = parameter_names(part.model_chunks)
            for param, master in owned_masters(part):
                for kind, state in {"master": master, **part.optimizer.state[master]}.items():
                    first[f"{names[param]}, {kind}"] = state.detach().clone()

    return pretrain(
        [*FLAGS, *flags],
        MoEOptimConfig(format="mxfp8_2d", step="fused"),
        observe=lambda *_: first,
        after_setup=note,
    )


@on_ranks(1)
def test_every_replaced_name_fits():
    assert not [patch.id for patch in PATCHES if patch_state(patch).startswith("broken")]


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_quantized_experts_resume_to_the_bit_also_on_one_rank(tmp_path: Path, optimizer: str):
    """One rank begins with the masters and moments of two, and steps. Groups have several rates."""
    flags = ["--train-iters", str(STEPS), "--optimizer", optimizer, "--decoupled-lr", "0.03"]
    whole = run_ranks(2, _train, [*flags, "--save", str(tmp_path), "--save-interval", str(SAVED)])
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(str(SAVED))
    resumed = run_ranks(2, _train, [*flags, "--load", str(tmp_path)])
    (alone,) = run_ranks(1, _train, [*flags, "--load", str(tmp_path)])
    for rank in range(2):
        del whole[rank].losses[1], whole[rank].losses[SAVED]
        assert_same_run(resumed[rank], whole[rank], what=f"rank {rank}")
    shards = [one.extra for one in resumed]
    for name, state in alone.extra.items():
        parts = [shard[name].flatten() for shard in shards if name in shard]
        assert_same_tensors({name: state.flatten()}, {name: torch.cat(parts)}, what="first")
    assert alone.losses.keys() == resumed[0].losses.keys()


def test_momenta_resume_to_the_bit_from_files_of_ranks(tmp_path: Path):
    """Megatron's own functions name Adam's moments alone."""
    flags = ["--train-iters", str(STEPS), "--optimizer", "muon", "--ckpt-format", "torch"]
    whole = run_ranks(2, _train, [*flags, "--save", str(tmp_path), "--save-interval", str(SAVED)])
    saved = torch.load(next(tmp_path.glob(f"iter_*{SAVED}/*/distrib_optim.pt")), weights_only=True)
    names = {
        name
        for part in saved
        for number, buffer in part.items()
        if isinstance(number, int)
        for tensors in buffer.values()
        for name in tensors
    }
    assert names == {"param", "momentum_buffer", "exp_avg", "exp_avg_sq", "numel_unpadded"}
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(str(SAVED))
    resumed = run_ranks(2, _train, [*flags, "--load", str(tmp_path)])
    for rank in range(2):
        del whole[rank].losses[1], whole[rank].losses[SAVED]
        assert_same_run(resumed[rank], whole[rank], what=f"rank {rank}")


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--chunked-optimizer-state-offload"], "Set offload_states"),
        (["--disable-grad-buffers-cpu-backup"], "bytes in that memory"),
    ],
    ids=["offload", "no backup"],
)
def test_what_does_not_fit_is_refused_by_name(flags: list[str], reason: str):
    with pytest.raises(AssertionError, match=reason):
        run_ranks(1, _train, [*flags, "--train-iters", "1"])
