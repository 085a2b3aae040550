"""Amaxes of Transformer Engine's own experts: recorded, and in checkpoints as portable experts'.

Megatron's module for them is its own; linears and weights stand in, see ``te_experts``.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_optim.config import MoEOptimConfig
from moe_optim.errors import ConfigError
from moe_optim.formats import FORMATS
from tests.support import experts
from tests.support.amax import amax_of, save_module
from tests.support.bytes import assert_bytes_equal
from tests.support.inputs import wide_range_weights
from tests.support.ranks import run_ranks

GLOBAL_EXPERTS = 6
PREFIX = "layer."
CASES = [("mxfp8", False), ("mxfp8", True), ("mxfp8_2d", True), ("nvfp4", False), ("nvfp4", True)]
"""Format, and whether one weight holds all experts of a linear."""


def masters_of(linear: str, shape: tuple[int, int, int]) -> torch.Tensor:
    """Return fp32 masters of all experts; another amax for each, which rounding to bf16 changes."""
    seed = {"linear_fc1": 0, "linear_fc2": 1}[linear]
    return wide_range_weights(*shape, seed=seed) * torch.arange(1, shape[0] + 1).view(-1, 1, 1)


def _config(ep: int) -> Any:
    return experts.make_config(
        num_moe_experts=GLOBAL_EXPERTS, expert_model_parallel_size=ep, moe_ffn_hidden_size=96
    )


def _make(ep: int, format: str, single: bool, **knobs: Any) -> Any:
    """Return experts under an installation that records."""
    from moe_optim.megatron import installation
    from moe_optim.megatron.weights.managed import storage_of
    from tests.support.te_experts import make_experts

    installation.uninstall()
    config = MoEOptimConfig(**{"format": format, "record_amax": True} | knobs)
    installation.install(config)
    stored_as = None if format == "bf16" else FORMATS[format]
    groups = experts._seeded_groups()
    options: dict[str, Any] = {"single": single, "format": stored_as}
    module = make_experts(GLOBAL_EXPERTS // ep, _config(ep), pg_collection=groups, **options)
    for weight in _weights(module):
        storage_of(weight)  # as wrapping with DDP asks
    return module


def _weights(module: Any) -> list[Any]:
    linears = (module.linear_fc1, module.linear_fc2)
    return [weight for linear in linears for weight in linear._parameters.values()]


def _record(module: Any, ep: int) -> dict[str, torch.Tensor]:
    """Quantize this rank's experts as a gather does; return the amaxes of all, in plain torch."""
    from moe_optim.megatron.buffers.amax_record import AmaxRecord
    from moe_optim.megatron.buffers.gather import OwnedMaster
    from moe_optim.megatron.weights.managed import storage_of

    expected = {}
    for name in ("linear_fc1", "linear_fc2"):
        weights = list(module.get_submodule(name)._parameters.values())
        count = GLOBAL_EXPERTS // ep
        shape = (GLOBAL_EXPERTS, *weights[0].shape[-2:])
        masters = masters_of(name, shape)
        expected[name] = amax_of(masters)
        mine = masters[dist.get_rank() % ep * count :][:count]
        parts = [mine] if len(weights) == 1 else mine.split(1)
        for weight, part in zip(weights, parts, strict=True):
            storage_of(weight).write(part)
            if storage_of(weight).recorded_amax is not None:
                storage_of(weight).recorded_amax.fill_(torch.nan)  # a gather alone knows it
        record = AmaxRecord.of(weights)
        if record is not None:
            owned = zip(weights, parts, strict=True)
            record.fill([OwnedMaster(param=w, start=0, master=p.reshape(-1)) for w, p in owned])
            record.land()
    return expected


def _load(module: Any, folder: Path) -> Any:
    from megatron.core import dist_checkpointing

    state = dist_checkpointing.load(module.sharded_state_dict(prefix=PREFIX), str(folder))
    module.load_state_dict({name.removeprefix(PREFIX): value for name, value in state.items()})
    return module


def _loaded(module: Any) -> dict[str, torch.Tensor]:
    from moe_optim.megatron.te.grouped_linears import grouped_linears, recorder_of

    return {name: recorder_of(linear).whole_amax for name, linear in grouped_linears(module)}


def _save_on_two_ranks(folder: Path) -> dict[str, torch.Tensor]:
    experts.start_ranks(expert_model_parallel_size=2)
    for format, single in CASES:
        module = _make(2, format, single)
        expected = _record(module, 2)
        save_module(module, folder / f"{format} {single}", PREFIX)
    return expected


def _load_on_one_rank(folder: Path) -> dict[tuple[str, bool, str], dict[str, torch.Tensor]]:
    """Load into either layout, and into portable experts; save what those hold."""
    from moe_optim.megatron.experts.module import GroupedExperts
    from tests.support.amax import linears_of

    experts.start_ranks()
    found = {}
    for format, single in CASES:
        saved = folder / f"{format} {single}"
        module = _load(_make(1, format, not single), saved)
        found[format, single, "other layout"] = _loaded(module)
        save_module(module, folder / f"{format} {single} from one", PREFIX)
        portable = GroupedExperts(
            GLOBAL_EXPERTS,
            _config(1),
            moe_optim_config=MoEOptimConfig(format=format, record_amax=True),
            pg_collection=experts._seeded_groups(),
        )
        _load(portable, saved)
        linears = linears_of(portable)
        found[format, single, "portable"] = {n: one.whole_amax for n, one in linears.items()}
    return found


def _load_on_two_ranks(folder: Path) -> list[dict[str, torch.Tensor]]:
    experts.start_ranks(expert_model_parallel_size=2)
    return [
        _loaded(_load(_make(2, format, single), folder / f"{format} {single} from one"))
        for format, single in CASES
    ]


def test_amaxes_follow_their_experts_over_expert_parallel_sizes(tmp_path: Path):
    """Three experts on each of two ranks, six on one in the other layout or in portable experts,
    and two ranks again: always the amaxes of the masters, rounded to bf16, in plain torch."""
    expected, other = run_ranks(2, _save_on_two_ranks, tmp_path)
    (found,) = run_ranks(1, _load_on_one_rank, tmp_path)
    again = run_ranks(2, _load_on_two_ranks, tmp_path)
    assert len(found) == 2 * len(CASES)
    for name, want in expected.items():
        assert torch.equal(want, other[name]) and len(want.unique()) == GLOBAL_EXPERTS
        for case, amaxes in found.items():
            assert_bytes_equal(amaxes[name], want, what=f"{case} {name}")
        for case, *ranks in zip(CASES, *again, strict=True):
            back = torch.cat([rank[name] for rank in ranks])
            assert_bytes_equal(back, want, what=f"{case} {name} on two ranks")


def _unknown(folder: Path) -> None:
    """Save before anything was recorded, or with bf16 weights; load where nothing is recorded."""
    from megatron.core import dist_checkpointing

    from moe_optim.megatron import installation

    experts.start_ranks()
    module = _make(1, "mxfp8", False)
    save_module(module, folder / "new", PREFIX)
    assert set(_loaded(_load(module, folder / "new")).values()) == {None}
    _record(module, 1)
    save_module(module, folder / "recorded", PREFIX)
    bf16 = _make(1, "bf16", False, record_amax=False)
    assert not [key for key in bf16.sharded_state_dict() if "amax" in key]
    _load(bf16, folder / "recorded")  # and stock Megatron, which asks for the same keys
    installation.uninstall()
    installation.install(MoEOptimConfig(format="mxfp8", record_amax=True))
    state = bf16.sharded_state_dict(prefix=PREFIX)  # a layer that was left in bf16
    assert state[f"{PREFIX}linear_fc1.weight_amax"].data.isnan().all()
    assert set(_loaded(_load(bf16, folder / "recorded")).values()) == {None}
    _load(_make(1, "mxfp8", True), folder / "recorded")
    dist_checkpointing.save(bf16.sharded_state_dict(prefix=PREFIX), str(_made(folder / "bf16")))
    with pytest.raises(ConfigError, match="singleton_local_shards: expected one key for all"):
        module.sharded_state_dict(prefix=PREFIX, metadata={"singleton_local_shards": True})


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_what_nobody_recorded_is_saved_and_loaded_as_unknown(tmp_path: Path):
    """Keys are the same whatever was recorded, since those of all layers may be one tensor."""
    run_ranks(1, _unknown, tmp_path)
