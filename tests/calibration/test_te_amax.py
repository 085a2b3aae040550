"""Amaxes of Transformer Engine's own experts: recorded, and in checkpoints as portable experts'.

Megatron's module for them is its own; linears and weights stand in, see ``te_experts``.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_optim.config import MoEOptimConfig
from moe_optim.errors import ConfigError
from moe_optim.formats import FORMATS
from tests.support.bytes import assert_bytes_equal, assert_same_tensors
from tests.support.inputs import wide_range_weights
from tests.support.modules import experts
from tests.support.modules.amax import amax_of, load_module, save_module, saved_amaxes
from tests.support.modules.calibrating import local_part
from tests.support.ranks import run_ranks

GLOBAL_EXPERTS, FFN = 6, 128
PREFIX = "layer."
SPREAD = {"expert_model_parallel_size": 2}
CUT = {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2}
CASES = [("mxfp8_2d", True), ("nvfp4", False)]
"""Format, and whether one weight holds all experts of a linear."""


def masters_of(linear: str, shape: tuple[int, int, int]) -> torch.Tensor:
    """Return fp32 masters of all experts; another amax for each, which rounding to bf16 changes."""
    seed = {"linear_fc1": 0, "linear_fc2": 1}[linear]
    return wide_range_weights(*shape, seed=seed) * torch.arange(1, shape[0] + 1).view(-1, 1, 1)


def _config(ep: int, tp: int = 1) -> Any:
    return experts.make_config(
        num_moe_experts=GLOBAL_EXPERTS,
        expert_model_parallel_size=ep,
        tensor_model_parallel_size=tp,
        expert_tensor_parallel_size=tp,
        moe_ffn_hidden_size=FFN,
    )


def _make(ep: int, format: str, single: bool, tp: int = 1, **knobs: Any) -> Any:
    """Return experts under an installation that records."""
    from moe_optim.integration import installation
    from moe_optim.weights.managed import storage_of
    from tests.support.te.te_experts import make_experts

    installation.uninstall()
    config = MoEOptimConfig(**{"format": format, "record_amax": True} | knobs)
    installation.install(config)
    stored_as = None if format == "bf16" else FORMATS[format]
    groups = experts._seeded_groups()
    options: dict[str, Any] = {"single": single, "format": stored_as}
    module = make_experts(GLOBAL_EXPERTS // ep, _config(ep, tp), pg_collection=groups, **options)
    for weight in _weights(module):
        storage_of(weight)  # as wrapping with DDP asks
    return module


def _weights(module: Any) -> list[Any]:
    linears = (module.linear_fc1, module.linear_fc2)
    return [weight for linear in linears for weight in linear._parameters.values()]


def _record(module: Any, ep: int, tp: int = 1) -> SimpleNamespace:
    """Quantize this rank's experts as a gather does; return amaxes of plain torch by linear.

    Returns:
        ``whole``, of all experts, and ``mine``, of what this rank has of them.
    """
    from moe_optim.buckets.gather import AmaxRecord, OwnedMaster
    from moe_optim.weights.managed import storage_of

    expected = SimpleNamespace(whole={}, mine={})
    for name, rows in (("linear_fc1", 2 * FFN), ("linear_fc2", experts.HIDDEN)):
        weights = list(module.get_submodule(name)._parameters.values())
        shape = (GLOBAL_EXPERTS, rows, experts.HIDDEN if name == "linear_fc1" else FFN)
        masters = masters_of(name, shape)
        expected.whole[name] = amax_of(masters)
        mine = local_part(name, masters, ep, tp)
        expected.mine[name] = amax_of(mine)
        parts = [mine] if len(weights) == 1 else mine.split(1)
        for weight, part in zip(weights, parts, strict=True):
            storage_of(weight).write(part)
            if storage_of(weight).recorded_amax is not None:
                storage_of(weight).recorded_amax.fill_(torch.nan)  # a gather alone knows it
        record = AmaxRecord.of(weights)
        if record is not None:
            owned = zip(weights, parts, strict=True)
            record.fill([OwnedMaster(param=w, start=0, master=p.reshape(-1)) for w, p in owned])
            record.finish()
    return expected


def _loaded(module: Any) -> dict[str, torch.Tensor]:
    from moe_optim.calibration.linears import grouped_linears, recorder_of

    return {name: recorder_of(linear).whole_amax for name, linear in grouped_linears(module)}


def _save(folder: Path) -> tuple[SimpleNamespace, SimpleNamespace]:
    """Record and save experts spread over ranks, then cut ones, twice: before and after the amaxes
    of parts are put together."""
    from moe_optim.calibration.state_entries import synchronize_amax

    experts.start_ranks(**SPREAD)
    for format, single in CASES:
        module = _make(2, format, single)
        spread = _record(module, 2)
        save_module(module, folder / f"{format} spread", PREFIX)
    experts.start_ranks(**CUT)
    for format, single in CASES:
        module = _make(1, format, single, tp=2)
        cut = _record(module, 1, tp=2)
        save_module(module, folder / f"{format} parts", PREFIX)
        synchronize_amax([module])
        assert_same_tensors(_loaded(module), cut.whole)
        save_module(module, folder / f"{format} cut", PREFIX)
        _record(module, 1, tp=2)  # which makes amaxes of parts of them again
        assert set(_loaded(module).values()) == {None}
    return spread, cut


def _load_on_one(folder: Path) -> dict[tuple[str, str], dict[str, torch.Tensor]]:
    """Load into the other layout, and into portable experts; save what the former hold."""
    from moe_optim.experts.module import GroupedExperts
    from tests.support.modules.amax import linears_of

    experts.start_ranks()
    found = {}
    for format, single in CASES:
        for way in ("spread", "cut"):
            module = load_module(_make(1, format, not single), folder / f"{format} {way}", PREFIX)
            found[format, way] = _loaded(module)
        save_module(module, folder / f"{format} whole", PREFIX)
        load_module(module, folder / f"{format} parts", PREFIX)
        assert set(_loaded(module).values()) == {None}
        portable = GroupedExperts(
            GLOBAL_EXPERTS,
            _config(1),
            moe_optim_config=MoEOptimConfig(format=format, record_amax=True),
            pg_collection=experts._seeded_groups(),
        )
        load_module(portable, folder / f"{format} spread", PREFIX)
        linears = linears_of(portable)
        found[format, "portable"] = {n: one.whole_amax for n, one in linears.items()}
    _check_unknown(folder)
    return found


def _load_on_two(folder: Path) -> dict[tuple[str, str], dict[str, torch.Tensor]]:
    """Load what one rank saved; save and load cut experts without any reduction in between."""
    found = {}
    experts.start_ranks(**SPREAD)
    for format, single in CASES:
        module = _make(2, format, single)
        found[format, "spread"] = _loaded(load_module(module, folder / f"{format} whole", PREFIX))
    experts.start_ranks(**CUT)
    for format, single in CASES:
        module = load_module(_make(1, format, single, tp=2), folder / f"{format} whole", PREFIX)
        save_module(module, folder / f"{format} cut again", PREFIX)
        again = load_module(_make(1, format, not single, tp=2), folder / f"{format} cut", PREFIX)
        found[format, "cut"] = _loaded(again)
        assert_same_tensors(_loaded(module), found[format, "cut"])
    return found


def test_amaxes_follow_their_experts_over_expert_parallel_sizes(tmp_path: Path):
    """Three experts on each of two ranks, or a half of every expert, of which neither has all
    amaxes; six on one in the other layout or in portable experts; and two ranks again: always the
    amaxes of the whole masters, rounded to bf16, in plain torch. Saved without a reduction, those
    of halves are unknown."""
    (spread, cut), (others, other_half) = run_ranks(2, _save, tmp_path)
    (found,) = run_ranks(1, _load_on_one, tmp_path)
    first, second = run_ranks(2, _load_on_two, tmp_path)
    for name, want in spread.whole.items():
        assert torch.equal(want, others.whole[name]) and len(want.unique()) == GLOBAL_EXPERTS
        assert torch.equal(want, cut.whole[name])
        halves = cut.mine[name], other_half.mine[name]
        assert not any(torch.equal(half, want) for half in halves)
        assert torch.equal(torch.maximum(*halves), want)
    for amaxes in found.values():
        assert_same_tensors(amaxes, spread.whole)
    for format, _ in CASES:
        both = first[format, "spread"], second[format, "spread"]
        assert_same_tensors({n: torch.cat([one[n] for one in both]) for n in both[0]}, spread.whole)
        for of_rank in (first, second):
            assert_same_tensors(of_rank[format, "cut"], spread.whole)
        saved = saved_amaxes(tmp_path / f"{format} cut again")
        for name, want in spread.whole.items():
            key = f"{PREFIX}experts.{name}.weight_amax"
            assert_bytes_equal(saved[key].view(-1), want, what=f"{format} saved {name}")


def _check_unknown(folder: Path) -> None:
    """What nobody recorded is saved and loaded as unknown: before anything was recorded, with bf16
    weights, and where nothing is recorded. Keys are the same, since those of all layers may be one
    tensor.
    """
    from megatron.core import dist_checkpointing

    from moe_optim.integration import installation

    module = _make(1, "mxfp8", False)
    save_module(module, folder / "new", PREFIX)
    assert set(_loaded(load_module(module, folder / "new", PREFIX)).values()) == {None}
    _record(module, 1)
    save_module(module, folder / "recorded", PREFIX)
    bf16 = _make(1, "bf16", False, record_amax=False)
    assert not [key for key in bf16.sharded_state_dict() if "weight_amax" in key]
    load_module(
        bf16, folder / "recorded", PREFIX
    )  # and stock Megatron, which asks for the same keys
    installation.uninstall()
    installation.install(MoEOptimConfig(format="mxfp8", record_amax=True))
    state = bf16.sharded_state_dict(prefix=PREFIX)  # a layer that was left in bf16
    assert state[f"{PREFIX}linear_fc1.weight_amax"].data.isnan().all()
    assert set(_loaded(load_module(bf16, folder / "recorded", PREFIX)).values()) == {None}
    load_module(_make(1, "mxfp8", True), folder / "recorded", PREFIX)
    dist_checkpointing.save(bf16.sharded_state_dict(prefix=PREFIX), str(_made(folder / "bf16")))
    with pytest.raises(
        ConfigError, match="singleton_local_shards: expected one key for .*got record_amax"
    ):
        module.sharded_state_dict(prefix=PREFIX, metadata={"singleton_local_shards": True})


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
