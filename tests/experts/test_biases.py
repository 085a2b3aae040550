"""Expert biases are those of Megatron's sequential experts: values, gradients, attributes, keys."""

from typing import Any

import pytest
import torch

from tests.support.modules import experts
from tests.support.ranks import run_ranks
from tests.support.training import assert_same_tensors

LAYOUTS = ("grouped", "indexed")
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def _compare() -> dict[str, Any]:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess

    # Megatron's own experts add their second bias in place, which torch refuses at 1 rank
    experts.start_ranks(expert_model_parallel_size=2)
    config = experts.make_config(add_bias_linear=True, expert_model_parallel_size=2)
    found: dict[str, Any] = {
        str(dtype): experts.compare_kinds(config, probs_dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16)
    }
    modules = {"stock": experts.make_stock(config)}
    modules |= {layout: experts.make_ours(config, expert_layout=layout) for layout in LAYOUTS}
    for name, module in modules.items():
        state, _, _ = load_preprocess(module.sharded_state_dict("layer."))
        entries = [one if isinstance(one, list) else [one] for one in state.values()]
        tensors = [one for entry in entries for one in entry if isinstance(one, ShardedTensor)]
        found[f"keys of {name}"] = {(one.key, one.global_shape) for one in tensors}
    return found


@pytest.fixture(scope="module")
def rank() -> dict[str, Any]:
    """Return what the second of two ranks found: initial values, passes and attributes of all
    experts by dtype of routing weights, and the keys of their checkpoints."""
    return run_ranks(2, _compare)[1]


@pytest.fixture(params=["torch.float32", "torch.bfloat16"])
def results(rank, request) -> dict[str, Any]:
    return rank[request.param]


def test_keys_and_global_shapes_are_megatrons(rank):
    stock = rank["keys of stock"]
    assert rank["keys of grouped"] == rank["keys of indexed"] == stock
    assert ("layer.experts.linear_fc2.bias", (6, 64)) in stock


@every_layout
def test_biases_start_at_zero_and_weights_as_without_biases(results, layout):
    assert_same_tensors(results[layout][0], results["stock"][0], what="initial")
    biases = [value for name, value in results[layout][0].items() if name.endswith("bias")]
    assert len(biases) == 2 * experts.EXPERTS
    assert not any(bias.any() for bias in biases)


@every_layout
def test_parameters_have_the_attributes_of_megatrons(results, layout):
    assert results[layout][2] == results["stock"][2]
    assert "partition_stride" not in results["stock"][2]["linear_fc2.bias"]
