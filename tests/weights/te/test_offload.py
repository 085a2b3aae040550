"""Weights of Transformer Engine on the host and back: every tensor has its bytes again."""

from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_optim.buckets.offload import ParamData
from moe_optim.calibration import state_entries
from moe_optim.errors import StateError
from moe_optim.formats import DIRECTIONS, MXFP8
from moe_optim.weights.storage import PortableStorage, Weights
from moe_optim.weights.te.fields import read_values
from moe_optim.weights.te.storage import TransformerEngineStorage
from moe_optim.weights.te.tensorwise import codes_and_scale
from tests.support.ranks import on_ranks
from tests.support.states.buckets import bind
from tests.support.te import te_stand_ins
from tests.support.te.te_stand_ins import Float8CurrentScalingQuantizer, Float8Tensor, MXFP8Tensor
from tests.weights.te.test_storage import (
    EVERY_KIND,
    KINDS,
    assert_all_hold,
    bucket_memory,
    requantize,
)


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
    bucket.is_now(Weights.OFFLOADED)
    param_data.resize_(0)
    buckets = [weight, *getattr(weight, "quantized_tensors", [])]
    tensors = [value for one in buckets for value in vars(one).values()]
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.dtype is torch.uint8:
            assert tensor.untyped_storage().nbytes() == 0
    with pytest.raises(StateError, match="they are offloaded"):
        read_values(weight)
    param_data.resize_(size)
    param_data.copy_(on_host)
    bucket.is_now(Weights.FRESH)
    assert_all_hold(weight, first, kind.format)
    if storage.has_moved():  # memory may come back where it was
        storage.take_over()
    requantize(storage, second)
    assert_all_hold(weight, second, kind.format)
    assert set(storage.storage_scales) == set(DIRECTIONS)


READERS = {
    "values": lambda weight, storage: read_values(weight),
    "values of a member": lambda weight, storage: read_values(
        getattr(weight, "quantized_tensors", [weight])[0]
    ),
    "buffers": lambda weight, storage: storage.quantized,
    "dequantize": lambda weight, storage: storage.dequantize("columnwise"),
    "amax": lambda weight, storage: storage.amax,
    "clone": lambda weight, storage: storage.clone(),
    "requantize": lambda weight, storage: storage.write(torch.ones(storage.shape)),
    "bytes of another": lambda weight, storage: storage.copy_bytes_from(
        PortableStorage(storage.format, storage.shape)
    ),
    "scales of what came": lambda weight, storage: storage.note_write(),
    "tensors taken over": lambda weight, storage: storage.take_over(),
    "initial values": lambda weight, storage: storage.renew_initial(),
    "another bucket": lambda weight, storage: bind(storage),
}


def _refusal(read: Callable[[], Any]) -> str:
    try:
        read()
    except StateError as error:
        return str(error)
    return "nothing"


UNKNOWN = ("mxfp8", "group of nvfp4")  # kinds of which the bucket may not know it


@on_ranks(1)
def test_bytes_that_are_away_are_neither_read_nor_written():
    """Also where the bucket does not know of it, as Megatron's own buffers, which hold weights with
    one scale, free memory without a word. In a process that a read would end."""
    said = {}
    for (named, kind), (what, read), known in product(
        KINDS.items(), READERS.items(), (True, False)
    ):
        if not known and named not in UNKNOWN:
            continue
        weight: Any = kind.weight(kind.masters(1))
        storage = weight.quantized_storage = TransformerEngineStorage(weight, kind.format)
        bucket = bind(storage, bucket_memory(storage))
        ParamData([storage]).resize_(0)
        bucket.is_now(Weights.OFFLOADED if known else Weights.FRESH)
        refusal = _refusal(lambda: read(weight, storage))  # noqa: B023  # at once
        said[f"{named}: {what}, {known}"] = refusal
    for field, read in product(("_data", "_transpose"), (read_values, codes_and_scale)):
        weight = Float8Tensor(torch.ones(16, 16), Float8CurrentScalingQuantizer())
        weight._transpose = weight._data.t().contiguous()
        read(weight)
        getattr(weight, field).untyped_storage().resize_(0)
        said[f"{field}: {read.__name__}"] = _refusal(lambda: read(weight))  # noqa: B023  # at once
    assert len(said) == (len(KINDS) + len(UNKNOWN)) * len(READERS) + 4
    for what, message in said.items():
        assert "offloaded. Call reload_from_cpu()" in message, what


class GroupedLinearOfTE(torch.nn.Module):
    """As Megatron tells Transformer Engine's grouped linears."""

    _split_grouped_checkpoint_tensor = None


def test_a_layer_of_experts_that_are_away_gives_no_state_to_save(monkeypatch):
    """Its entries would be read later, by whoever saves."""
    weight = te_stand_ins.as_parameter(MXFP8Tensor(MXFP8, torch.ones(32, 32)))
    linear: Any = GroupedLinearOfTE()
    linear.num_gemms = 1
    linear.register_parameter("weight0", weight)
    experts: Any = torch.nn.Module()
    experts.config, experts.linear_fc1 = None, linear
    storage = weight.quantized_storage = TransformerEngineStorage(weight, MXFP8)
    bucket = bind(storage)
    monkeypatch.setattr(state_entries, "original", lambda _: lambda *_: {})
    monkeypatch.setattr(state_entries, "_are_recorded", lambda _: False)
    monkeypatch.setattr(state_entries, "calibrated_entry", lambda *_: None)
    one = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    linear._pg_collection = SimpleNamespace(ep=one, expt_tp=one, expt_dp=one)
    entries = ("linear_fc1.calibrated_amax", "linear_fc1.calibrated_input_amax")
    assert state_entries.sharded_state_dict(experts) == dict.fromkeys(entries)
    bucket.is_now(Weights.OFFLOADED)
    with pytest.raises(StateError, match="offloaded. Call reload_from_cpu"):
        state_entries.sharded_state_dict(experts)
