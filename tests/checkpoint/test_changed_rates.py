"""A resumed run has another learning rate where Megatron's flag overrides the saved schedule."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_optim.checkpoint.param_groups import set_groups
from moe_optim.config import MoEOptimConfig
from tests.support.ranks import run_ranks
from tests.support.training import Record, pretrain

pytestmark = pytest.mark.slow

RUN = ["--train-iters", "4", "--eval-interval", "1000000", "--lr-decay-style", "constant"]
RUN += ["--dist-ckpt-optim-fully-reshardable"]
SAVED = ["--lr", "1e-2", "--min-lr", "1e-3"]
OTHER = ["--lr", "3e-2", "--min-lr", "2e-3"]
OVERRIDE = ["--override-opt_param-scheduler"]
APART = ["--expert-model-parallel-size", "2"]  # experts have an optimizer of their own


def _train(flags: list[str]) -> Record:
    def rates(_: Any, optimizer: Any) -> list[tuple[float, float, float]]:
        return [(group["lr"], group["max_lr"], group["min_lr"]) for group in optimizer.param_groups]

    return pretrain([*RUN, *flags], MoEOptimConfig(format="bf16"), observe=rates)


def _resume(flags: list[str]) -> Record | str:
    try:
        return _train(flags)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two of four steps on two ranks, saved."""
    folder = tmp_path_factory.mktemp("checkpoint")
    run_ranks(2, _train, [*SAVED, "--save", str(folder), "--exit-interval", "2"])
    return folder


def resume(checkpoint: Path, *flags: str) -> Any:
    return run_ranks(2, _resume, ["--load", str(checkpoint), *flags])[0]


def test_another_rate_takes_effect_where_it_overrides(checkpoint: Path):
    """The next step is taken with it, and with the masters and moments that were saved by one
    optimizer, and are loaded into two."""
    changed = resume(checkpoint, *OTHER, *OVERRIDE, *APART)
    assert isinstance(changed, Record), changed
    assert changed.extra and set(changed.extra) == {(3e-2, 3e-2, 2e-3)}
    kept = resume(checkpoint, *SAVED, *APART)
    assert set(kept.extra) == {(1e-2, 1e-2, 1e-3)}
    assert set(changed.losses) == set(kept.losses) == {3, 4}
    assert changed.losses[3] == kept.losses[3]  # before a step with either
    assert changed.losses[4] != kept.losses[4]
    moments = zip(changed.moments.values(), kept.moments.values(), strict=True)
    assert not all(torch.equal(one["exp_avg"], other["exp_avg"]) for one, other in moments)


def test_another_rate_without_it_is_refused_with_both(checkpoint: Path):
    assert resume(checkpoint, *OTHER) == (
        "LayoutError: optimizer: expected the learning rates that were saved, max_lr=0.01 and "
        "min_lr=0.001, got max_lr=0.03 and min_lr=0.002. Give the same --lr and --min-lr, or "
        "change them with --override-opt_param-scheduler."
    )


def test_a_rate_of_embeddings_alone_leaves_that_of_the_others(checkpoint: Path, tmp_path: Path):
    """And where both change, nothing tells which of the saved groups is which."""
    apart = ["--decoupled-lr", "3e-2", "--decoupled-min-lr", "2e-3"]
    resumed = resume(checkpoint, *SAVED, *apart, *OVERRIDE, "--save", str(tmp_path))
    assert isinstance(resumed, Record), resumed
    assert set(resumed.extra) == {(1e-2, 1e-2, 1e-3), (3e-2, 3e-2, 2e-3)}
    refused = resume(tmp_path, *SAVED, *apart[:1], "4e-2", *apart[2:], *OVERRIDE)
    assert "LayoutError: optimizer: expected a saved parameter group with max_lr=0.04" in refused
    assert "got several with other learning rates: max_lr=0.01, min_lr=0.001, " in refused


@pytest.mark.parametrize("names", [("embeddings", "output"), ("output", "embeddings")])
def test_groups_that_differ_in_eps_alone_keep_it(names: tuple[str, str]):
    """As those of embeddings and output under --use-mup with --decoupled-lr, which Megatron mixes
    up."""
    rates = {"max_lr": 3e-2, "min_lr": 2e-3, "wd_mult": 1.0}
    saved = [{**rates, "eps": eps, "step": 2, "params": [0]} for eps in (1e-8, 2.5e-9)]
    of_name = dict(zip(("embeddings", "output"), saved, strict=True))
    loaded = [{**saved[-1], "params": [name]} for name in names]
    set_groups(SimpleNamespace(param_groups=loaded), [of_name[name] for name in names], saved)
    assert [group["params"] for group in loaded] == [[name] for name in names]
    assert [group["eps"] for group in loaded] == [of_name[name]["eps"] for name in names]
