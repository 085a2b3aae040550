"""Rows of gate and up that alternate, under Megatron-Bridge: it sorts them around checkpoints.

On disk gate comes first, it says. On a save it sorts tensors, and passes by the factories that
experts of Megatron and of this package give it; on a load it sorts what factories have merged. With
``MEGATRON_BRIDGE_PATH`` its own function takes the place of the one that is restated here.
"""

import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_optim.config import MoEOptimConfig
from tests.integration.test_bridge import BridgeCheckpoint, _scramble
from tests.support.ranks import run_ranks
from tests.support.training import Record, _record_state, assert_same_run, pretrain
from tools.upstream.stand_in_imports import find_bridge, standing_in

BRIDGE = find_bridge()
SIZE = 32  # three blocks each of gate and up: to sort twice is not to sort at all
FLAGS = ["--train-iters", "2", "--eval-interval", "2", "--moe-mlp-glu-interleave-size", str(SIZE)]
SORTS = [
    "restated",
    pytest.param("its own", marks=pytest.mark.skipif(BRIDGE is None, reason="no Megatron-Bridge")),
]


def alternate(rows: torch.Tensor) -> torch.Tensor:
    """Return [2F, C] with blocks of gate and up in turn, given gate first."""
    return rows.unflatten(0, (2, -1, SIZE)).transpose(0, 1).flatten(0, 2)


def gate_first(rows: torch.Tensor) -> torch.Tensor:
    """Return [2F, C] with gate first, given blocks in turn."""
    return rows.unflatten(0, (-1, 2, SIZE)).transpose(0, 1).flatten(0, 2)


def restated(state: dict[str, Any], interleave: bool) -> dict[str, Any]:
    """Sort what Megatron-Bridge sorts of what is given here: loaded tensors of routed experts."""
    sort = alternate if interleave else gate_first

    def is_sorted(key: str, value: Any) -> bool:
        return ".experts.linear_fc1.weight" in key and isinstance(value, torch.Tensor)

    return {k: sort(value) if is_sorted(k, value) else value for k, value in state.items()}


def its_own() -> Callable[..., dict[str, Any]]:
    """Return the function of Megatron-Bridge, whose module imports much that is not here."""
    module = "megatron.bridge.training.checkpointing"
    import moe_optim.checkpoint.loading  # noqa: F401  # Megatron's classes, to stay the same

    real = [module, "megatron.bridge.utils.import_utils"]
    with standing_in(BRIDGE, "megatron.bridge", real, {}):
        sort = importlib.import_module(module)._process_state_dict_for_model_glu_interleaving
    return lambda state, interleave: sort(state, SIZE, None, interleave=interleave)


def _round_trips(
    model: list[Any], optimizer: Any, folder: Path, sort_rows: Callable[..., Any]
) -> dict[str, Any]:
    """Save, scramble and load with all states; then load weights alone that have gate first."""
    before, found = Record(), {}
    _record_state(before, model, optimizer)
    for reshardable in (False, True):
        place = folder / str(reshardable)
        checkpoint = BridgeCheckpoint(place, model[0], optimizer, reshardable, sort_rows)
        checkpoint.save()
        _scramble(model[0], optimizer)
        checkpoint.load()
        after = Record()
        _record_state(after, model, optimizer)
        assert_same_run(after, before, what=f"fully reshardable: {reshardable}")
        found[f"masters, {reshardable}"] = len(after.masters)
    return found | _load_weights_alone(model, optimizer, sort_rows)


def _load_weights_alone(
    model: list[Any], optimizer: Any, sort_rows: Callable[..., Any]
) -> dict[str, Any]:
    from megatron.core.utils import unwrap_model

    inner = unwrap_model(model[0])
    generator = torch.Generator().manual_seed(7)
    given, expected = {}, {}
    for name, parameter in inner.named_parameters():
        values = torch.randn(parameter.shape, generator=generator).bfloat16()
        is_sorted = ".experts.linear_fc1.weight" in name
        given[name], expected[parameter] = values, alternate(values) if is_sorted else values
    inner.load_state_dict(sort_rows({**inner.state_dict(), **given}, interleave=True))
    optimizer.reload_model_params()
    same = []
    for part in optimizer.chained_optimizers:
        groups = zip(part.model_float16_groups, part.shard_fp32_from_float16_groups, strict=True)
        for parameter, master in (pair for group in groups for pair in zip(*group, strict=True)):
            place = part._get_model_param_range_map(parameter)["param"]
            values = expected[parameter].flatten()[place.start : place.end]
            same.append(torch.equal(master, values.float()))
    return {"weights alone": all(same), "compared": len(same)}


def _train(folder: Path, kind: str) -> Any:
    sort_rows = restated if kind == "restated" else its_own()
    observe = partial(_round_trips, folder=folder, sort_rows=sort_rows)
    config = MoEOptimConfig(format="mxfp8", expert_layout="indexed")
    return pretrain(FLAGS, config, observe=observe).extra


@pytest.mark.parametrize("kind", SORTS)
def test_checkpoints_bring_interleaved_experts_back(tmp_path: Path, kind: str):
    """With masters, whatever becomes of the weights beside them: these are derived from masters.
    Without, from a checkpoint that has gate first, as those made of other models' weights do."""
    for found in run_ranks(2, _train, tmp_path, kind):
        assert found["masters, False"] == found["masters, True"] > 0
        assert found["weights alone"]
        assert found["compared"] > 0
