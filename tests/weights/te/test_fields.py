"""Values of Transformer Engine's weights are read where they mean something, or not at all."""

import copy
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from moe_optim import MoEOptimConfig
from moe_optim.checkpoint import saving as checkpoint_files
from moe_optim.errors import StateError
from moe_optim.formats import MXFP8
from moe_optim.weights import managed
from moe_optim.weights.storage import Weights
from moe_optim.weights.te.fields import is_quantized, is_tensorwise, read_values
from tests.support.bytes import assert_bytes_equal
from tests.support.inputs import wide_range_weights
from tests.support.states.buckets import bind, pointers
from tests.support.te.te_stand_ins import (
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Float8Tensor,
    GroupedTensor,
    MXFP8Tensor,
    as_tensor,
)

SHAPE = (96, 160)


@pytest.fixture(autouse=True)
def mxfp8_is_wanted(monkeypatch):
    for module in (managed, checkpoint_files):
        monkeypatch.setattr(module, "installed_config", lambda: MoEOptimConfig(format="mxfp8"))


def make_weight(grouped: bool = False) -> Any:
    if grouped:
        masters = torch.stack([wide_range_weights(*SHAPE, seed=seed) for seed in (1, 2)])
        return GroupedTensor(MXFP8Tensor, MXFP8, masters)
    return MXFP8Tensor(MXFP8, wide_range_weights(*SHAPE))


@pytest.mark.parametrize("grouped", [False, True], ids=["one", "group"])
def test_values_are_those_of_the_storage_unless_scales_are_in_the_order_of_products(grouped):
    weight = make_weight(grouped)
    storage = managed.storage_of(weight)
    assert_bytes_equal(read_values(weight), storage.dequantize("rowwise").view(weight.shape))
    weight._with_gemm_swizzled_scales = True
    with pytest.raises(StateError, match=r"expected plain scales.*start_param_sync"):
        read_values(weight)


@pytest.mark.parametrize("saved", ["one", "group", "member", "member made anew"])
def test_a_weight_behind_its_masters_is_not_saved(saved):
    """As a portable one is not: masters and weights would be of different steps."""
    weight = make_weight(grouped=saved != "one")
    storage = managed.storage_of(weight)
    storage.name = "experts.weight"
    if saved == "member made anew":
        weight.quantized_tensors = make_weight(grouped=True).quantized_tensors
        storage.take_over()  # as its bucket does before a gather
    data = weight.quantized_tensors[1] if saved.startswith("member") else weight
    entry = ShardedTensor.from_rank_offsets("experts.weight", torch.zeros(data.shape))
    entry.data = data
    bucket = bind(storage)
    bucket.is_now(Weights.STALE)
    with pytest.raises(StateError, match=r"^experts\.weight: .*earlier step.*start_param_sync"):
        checkpoint_files._save_values({"weight": entry})
    bucket.is_now(Weights.FRESH)
    checkpoint_files._save_values({"weight": entry})
    values = storage.dequantize("rowwise")
    assert_bytes_equal(entry.data, values if saved == "group" else values[-1])


def test_of_weights_with_one_scale_those_with_that_of_their_amax_are_left_to_megatron():
    """A scale from earlier amaxes is no function of the masters, and block formats are managed."""
    current = Float8Tensor(wide_range_weights(*SHAPE), Float8CurrentScalingQuantizer())
    delayed = Float8Tensor(wide_range_weights(*SHAPE), Float8Quantizer())
    weights = {"current": current, "delayed": delayed, "mxfp8": make_weight()}
    weights["bf16"] = torch.nn.Parameter(torch.zeros(2, 2))
    left = {name for name, one in weights.items() if is_tensorwise(one)}
    assert left == {"current"}
    assert {name for name, one in weights.items() if is_quantized(one)} == {"current", "mxfp8"}
    assert not managed.is_managed(current)
    values = current.dequantize(dtype=torch.bfloat16)
    assert_bytes_equal(read_values(current), values)
    entry = ShardedTensor.from_rank_offsets("linear.weight", torch.zeros(SHAPE))
    entry.data = as_tensor(current)
    checkpoint_files._save_values({"weight": entry})  # Megatron's writers read them on a GPU alone
    assert_bytes_equal(entry.data, values)


def test_a_copy_of_a_weight_has_a_storage_over_its_own_bytes():
    """A bucket of the copy would else gather into bytes that no product reads."""
    weight = make_weight()
    storage = managed.storage_of(weight)
    other = copy.deepcopy(weight)
    own = managed.storage_of(other)
    assert own is not storage
    assert own._param is other
    assert not set(pointers(own)) & set(pointers(storage))
    before = read_values(weight)
    own.write(torch.zeros(1, *SHAPE))
    assert not read_values(other).any()
    assert_bytes_equal(read_values(weight), before)
