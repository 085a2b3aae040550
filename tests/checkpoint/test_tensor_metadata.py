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

from moe_optim.checkpoint.loading import load_tensors_metadata

MEGATRONS = TorchDistLoadShardedStrategy.load_tensors_metadata


def describe(load: Any, **more: Any) -> tuple[Any, ...]:
    """Return what ``load`` makes of a tensor and an object, as such a torch reads them."""
    properties = TensorProperties(dtype=torch.bfloat16)
    vars(properties).update(more)
    tensor = TensorStorageMetadata(properties=properties, size=torch.Size([4, 3]), chunks=[])
    metadata = SimpleNamespace(state_dict_metadata={"a": tensor, "b": BytesStorageMetadata()})
    found = load(TorchDistLoadShardedStrategy(), Path(), metadata)
    assert list(found) == ["a"]
    return found["a"].dtype, found["a"].global_shape, found["a"].local_shape


def test_strides_are_left_out_where_megatron_makes_tensors_of_them():
    """Everything else is Megatron's answer to a torch without."""
    with pytest.raises(TypeError, match="strides"):
        describe(MEGATRONS, strides=(3, 1))
    want = (torch.bfloat16, (4, 3), (4, 3))
    assert describe(load_tensors_metadata, strides=(3, 1)) == want
    assert describe(load_tensors_metadata) == want
    if "strides" not in vars(TensorProperties()):
        assert describe(MEGATRONS) == want
