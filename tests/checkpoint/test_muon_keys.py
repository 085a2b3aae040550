"""Masters and momentum of Muon are found under the keys that Megatron's layer-wise Muon writes."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moe_optim.checkpoint.loading import fit_by_name
from moe_optim.errors import LayoutError

SHAPE = (4, 8)


@dataclass
class Request:
    """Request of a tensor, of which these functions read and replace the key."""

    key: str
    global_shape: tuple[int, ...] = SHAPE
    allow_shape_mismatch: bool = False


def _requests() -> dict[Any, dict[str, Any]]:
    kinds = ("param", "momentum_buffer")
    return {0: {kind: Request(f"optimizer.state.{kind}.w") for kind in kinds}}


def _stored(keys: list[str], shape: tuple[int, ...] = SHAPE) -> Any:
    tensors = {key: SimpleNamespace(shape=shape) for key in keys}
    return SimpleNamespace(tensors=tensors, path=Path("saved"))


def _keys(states: dict[Any, dict[str, Any]]) -> dict[str, str]:
    return {kind: request.key for kind, request in states[0].items()}


@pytest.mark.parametrize("prefix", ["", "chained_0."])
def test_masters_and_momentum_are_requested_as_they_were_saved(prefix: str):
    """Of one optimizer, or of a chain, whose number is in the keys of both."""
    saved = {
        "param": f"{prefix}optimizer.state.fp32_param.w",
        "momentum_buffer": f"{prefix}optimizer.state.momentum_buffer.w",
    }
    requests = _requests()
    fit_by_name(requests, _stored([*saved.values()]))
    assert _keys(requests) == saved


@pytest.mark.parametrize(
    ("shape", "key", "says"),
    [
        ((4, 9), "momentum_buffer", r"momentum_buffer\.w is \[4, 9\], expected \[4, 8\]"),
        (SHAPE, "exp_avg", r"momentum_buffer\.w is missing"),
    ],
)
def test_momentum_of_other_matrices_is_refused(shape: tuple[int, ...], key: str, says: str):
    stored = _stored([f"optimizer.state.{key}.w"], shape)
    with pytest.raises(LayoutError, match=f"states of this model.*{says}.*--no-load-optim"):
        fit_by_name(_requests(), stored)
