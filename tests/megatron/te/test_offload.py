"""Weights of Transformer Engine on the host and back: every tensor has its bytes again."""

import pytest
import torch

from moe_optim.errors import StateError
from moe_optim.formats import DIRECTIONS
from moe_optim.megatron.buffers.offload import ParamData
from moe_optim.megatron.te.fields import read_values
from moe_optim.megatron.te.storage import TransformerEngineStorage
from tests.megatron.te.test_storage import (
    EVERY_KIND,
    assert_all_hold,
    bucket_memory,
    requantize,
)
from tests.support.holders import bind


@EVERY_KIND
def test_an_offloaded_weight_holds_nothing_and_comes_back_whole(kind):
    """Members of a group and views stay tensors over one memory, wherever that is afterwards."""
    first, second = kind.masters(1), kind.masters(2)
    weight = kind.weight(first)
    storage = weight.quantized_storage = TransformerEngineStorage(weight, kind.format)
    bucket = bind(storage, bucket_memory(storage))
    param_data = ParamData([storage])
    size, on_host = param_data.size(), param_data.cpu()
    assert on_host.shape == (size,)
    bucket.is_offloaded = True
    param_data.resize_(0)
    holders = [weight, *getattr(weight, "quantized_tensors", [])]
    tensors = [value for one in holders for value in vars(one).values()]
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.dtype is torch.uint8:
            assert tensor.untyped_storage().nbytes() == 0
    with pytest.raises(StateError, match="they are offloaded"):
        read_values(weight)
    param_data.resize_(size)
    param_data.copy_(on_host)
    bucket.is_offloaded = False
    assert_all_hold(weight, first, kind.format)
    if storage.has_moved():  # memory may come back where it was
        storage.take_over()
    requantize(storage, second)
    assert_all_hold(weight, second, kind.format)
    assert set(storage.storage_scales) == set(DIRECTIONS)
