"""What is told of experts while Megatron trains is what their whole masters and weights say."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_optim.commands.train.events import Events, read_events
from moe_optim.config import MoEOptimConfig
from moe_optim.formats import get_format
from moe_optim.formats.health_figures import Sum
from tests.support.ranks import run_ranks
from tests.support.training import OVERLAP, pretrain
from tests.support.training_runs.health import assert_same_health, measure

pytestmark = pytest.mark.slow

LAST, INTERVAL = 4, 2
FLAGS = ["--train-iters", str(LAST), "--eval-interval", "1000", *OVERLAP]
EXPERT_PARALLEL = ("--expert-model-parallel-size", "2")
PIPELINE = ("--pipeline-model-parallel-size", "2")
INSTANCES = ("--num-distributed-optimizer-instances", "2")
INDEXED = {"expert_layout": "indexed", "step": "fused"}
RUNS = {  # format, ranks, knobs that differ, flags
    "cut over data and expert ranks": ("nvfp4", 4, INDEXED, EXPERT_PARALLEL),
    "layers on two stages, weights gathered in bf16": ("mxfp8", 2, {"wire": "bf16"}, PIPELINE),
    "copies of the optimizer, of which one counts": ("mxfp8_2d", 2, {}, INSTANCES),
}
EVERY_RUN = pytest.mark.parametrize("run", RUNS)


def train(format: str, knobs: dict[str, Any], flags: list[str]) -> dict[str, Any]:
    """Train on one of several ranks; return its masters at the last sample, and the report."""
    from megatron.training import global_vars

    from moe_optim.health import rows

    seen: dict[str, Any] = {"shards": []}

    def keep(step: int, model: list[Any], optimizer: Any) -> None:
        if step == 1:
            seen["routed"] = watch_routers(model)
        if step == LAST - INTERVAL:  # the last sample but one
            for routed in seen["routed"].values():
                routed.zero_()
        writer = global_vars.get_tensorboard_writer()
        if step == LAST and writer is not None:
            writer.flush()
            seen["events"] = read_events(Path(writer.log_dir), tensors="moe_optim/")
        if step != LAST - 1:  # the next step samples these before it moves them
            return
        names = rows.expert_names(model)
        for bucket in (bucket for part in optimizer.stepping for bucket in part.managed_buckets):
            for one in bucket.owner.masters_of(bucket):
                shape = one.param.quantized_storage.shape
                seen["shards"].append((names[one.param], shape, one.start, one.master.clone()))

    config = MoEOptimConfig(format=format, health_interval=INTERVAL, **knobs)  # type: ignore[arg-type]
    record = pretrain([*FLAGS, *flags], config, observe=latest_of, after_step=keep)
    latest, loads = record.extra
    return seen | {"latest": latest, "loads": loads, "losses": record.losses}


def latest_of(_: Any, optimizer: Any) -> Any:
    return optimizer.health.latest, optimizer.health.latest_loads


def watch_routers(model: list[Any]) -> dict[str, Tensor]:
    """Return layer -> this rank's tokens that its router sends to each expert, from now on."""
    routed = {}
    for layer in (one for chunk in model for one in chunk.modules() if hasattr(one, "mlp")):
        tokens = torch.zeros(4, dtype=torch.int64)
        routed[f"layers.{layer.layer_number - 1}.experts"] = tokens

        def add(_: Any, __: Any, result: Any, tokens: Tensor = tokens) -> None:
            if torch.is_grad_enabled():  # not those of evaluations
                tokens += result[1].sum(0)

        layer.mlp.router.register_forward_hook(add)
    return routed


@cache
def ranks_of(run: str) -> list[dict[str, Any]]:
    format, world, knobs, flags = RUNS[run]
    return run_ranks(world, train, format, knobs, list(flags))


def whole_masters(ranks: list[dict[str, Any]]) -> dict[tuple[str, int], Tensor]:
    """Return (linear, expert) -> master [R, C], put together of what all ranks own."""
    whole: dict[tuple[str, int], Tensor] = {}
    for names, (_, rows, cols), start, shard in (one for rank in ranks for one in rank["shards"]):
        numel = rows * cols
        of_param = torch.full((len(names) * numel,), torch.nan)
        of_param[start : start + len(shard)] = shard
        for name, part in zip(names, of_param.view(-1, rows, cols), strict=True):
            before = whole.get((name.layer, name.expert), part)
            whole[name.layer, name.expert] = torch.where(part.isnan(), before, part)
    assert not any(master.isnan().any() for master in whole.values())
    return whole


def events_of(ranks: list[dict[str, Any]]) -> Events:
    (events,) = (rank["events"] for rank in ranks if "events" in rank)  # one rank has a writer
    return events


@EVERY_RUN
def test_figures_are_those_of_whole_experts_by_their_numbers_among_all(run):
    """Every rank is told of the experts of all, under the layers of all stages."""
    ranks = ranks_of(run)
    whole = whole_masters(ranks)
    format = get_format(RUNS[run][0])
    layers = [f"layers.{layer}.{linear}" for layer in (0, 1) for linear in ("fc1", "fc2")]
    assert {layer for layer, _ in whole} == set(layers)
    for rank in ranks:
        assert [health.layer for health in rank["latest"]] == layers
        for health in rank["latest"]:
            assert health.experts == (0, 1, 2, 3)
            masters = torch.stack([whole[health.layer, expert] for expert in health.experts])
            sums, amaxes = measure(format, [masters])
            got = health.sums, health.amax.float()
            assert_same_health(got, (sums, amaxes), f"{run}: {health.layer}")
            assert (sums[:, Sum.ELEMENTS] == masters[0].numel()).all()


def assert_tokens_are_those_of_routers(ranks: list[dict[str, Any]]) -> None:
    routed: dict[str, Tensor] = {}
    for layer, tokens in (item for rank in ranks for item in rank["routed"].items()):
        routed[layer] = routed.get(layer, torch.zeros_like(tokens)) + tokens
    assert all(tokens.any() for tokens in routed.values())
    for rank in ranks:
        assert {load.layer for load in rank["loads"]} == set(routed)
        for load in rank["loads"]:
            assert load.experts == (0, 1, 2, 3)
            assert load.tokens.tolist() == routed[load.layer].tolist()
            busiest = max(load.tokens.tolist()) / (sum(load.tokens.tolist()) / 4)
            assert load.of_layer() == {"imbalance": pytest.approx(busiest)}


@EVERY_RUN
def test_tokens_of_experts_are_what_all_routers_sent_them_since_the_sample_before(run):
    assert_tokens_are_those_of_routers(ranks_of(run))


@EVERY_RUN
def test_the_rank_with_a_writer_writes_scalars_histograms_and_every_expert(run):
    """Under stable names, at the iterations that were sampled."""
    ranks = ranks_of(run)
    events = events_of(ranks)
    for health in (*ranks[0]["latest"], *ranks[0]["loads"]):
        for name, value in health.of_layer().items():
            points = events.scalars[f"moe_optim/{health.layer}/{name}"]
            assert [point.iteration for point in points] == [INTERVAL, LAST]
            assert points[-1].value == pytest.approx(value, rel=1e-6)
        for name, values in health.of_experts().items():
            points = events.tensors[f"moe_optim/{health.layer}/{name}/by_expert"]
            assert [iteration for iteration, _ in points] == [INTERVAL, LAST]
            np.testing.assert_array_equal(points[-1][1], values.float().numpy())
    assert "moe_optim/layers.1.fc2/saturated" in events.scalars


def test_sampling_changes_nothing():
    """Losses, to the bit."""
    format, world, knobs, flags = RUNS["layers on two stages, weights gathered in bf16"]
    config = MoEOptimConfig(format=format, **knobs)
    without = run_ranks(world, pretrain, [*FLAGS, *flags], config)
    sampled = ranks_of("layers on two stages, weights gathered in bf16")
    assert [one.losses for one in without] == [one["losses"] for one in sampled]
    assert any(len(one["losses"]) == LAST for one in sampled)


def test_tensor_parallel_slices_are_one_expert():
    """Of ranks that share experts, slices are quantized apart and counted together."""
    flags = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
    ranks = run_ranks(2, train, "nvfp4", {}, flags)
    assert_tokens_are_those_of_routers(ranks)  # both are given the same ones
    squares: dict[tuple[str, int], float] = {}
    for names, (_, rows, cols), start, shard in (one for rank in ranks for one in rank["shards"]):
        assert start == 0  # no data-parallel rank beside it
        of_experts = shard.bfloat16().double().view(-1, rows * cols).square().sum(1)
        for name, found in zip(names, of_experts.tolist(), strict=True):
            key = name.layer, name.expert
            squares[key] = squares.get(key, 0.0) + found
    for health in ranks[0]["latest"]:
        wanted = [squares[health.layer, expert] for expert in health.experts]
        assert health.sums[:, Sum.SQUARES].tolist() == pytest.approx(wanted, rel=1e-12)
        numel = 2 * 96 * 64 if health.layer.endswith("fc1") else 64 * 96
        assert health.sums[:, Sum.ELEMENTS].tolist() == [numel] * 4
