"""Strict loads with a torch that keeps strides of a tensor, as 2.15 does."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)

from moe_optim.checkpoint.hooks import load_tensors_metadata

LOADS = {"Megatron's": TorchDistLoadShardedStrategy.load_tensors_metadata}
LOADS["ours"] = load_tensors_metadata


def _describe(*, strides: tuple[int, ...] | None) -> Any:
    """Return the metadata of a tensor and an object, as such a torch reads it."""
    properties = TensorProperties(dtype=torch.bfloat16)
    if strides is not None:
        properties.strides = strides
    tensor = TensorStorageMetadata(properties=properties, size=torch.Size([4, 3]), chunks=[])
    return SimpleNamespace(state_dict_metadata={"a": tensor, "b/shard_0_1": BytesStorageMetadata()})


def _find(who: str, metadata: Any) -> tuple[Any, ...]:
    found = LOADS[who](TorchDistLoadShardedStrategy(), Path(), metadata)
    assert list(found) == ["a"]
    return found["a"].dtype, found["a"].global_shape, found["a"].local_shape


def test_strides_are_left_out_where_megatron_makes_tensors_of_them():
    """Everything else is Megatron's answer to a torch without."""
    with pytest.raises(TypeError, match="strides"):
        _find("Megatron's", _describe(strides=(3, 1)))
    want = (torch.bfloat16, (4, 3), (4, 3))
    assert _find("ours", _describe(strides=(3, 1))) == want
    assert _find("ours", _describe(strides=None)) == want


@pytest.mark.skipif(
    "strides" in vars(TensorProperties()), reason="this torch keeps strides of every tensor"
)
def test_megatron_reads_what_has_none():
    assert _find("Megatron's", _describe(strides=None)) == _find("ours", _describe(strides=None))
