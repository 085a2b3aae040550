"""Expert biases are those of Megatron's sequential experts: values, gradients, attributes, keys."""

from typing import Any

import pytest
import torch

from moe_optim.config import MoEOptimConfig
from moe_optim.experts.grouped_linear import GroupedLinear
from moe_optim.formats import MXFP8
from tests.support import training
from tests.support.bytes import assert_bytes_equal
from tests.support.modules import experts
from tests.support.ranks import run_ranks
from tests.support.training import Record, assert_same_tensors, pretrain

LAYOUTS = ("grouped", "indexed")
every_layout = pytest.mark.parametrize("layout", LAYOUTS)
STEPS = ["--train-iters", "3", "--eval-interval", "1000"]


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
def test_passes_with_biases_are_megatrons_to_the_bit(results, layout):
    """Outputs and all gradients; an expert without tokens has gradients of zero."""
    got, want = results[layout][1], results["stock"][1]
    assert_same_tensors(got, want, what="biased")
    assert want["0.linear_fc2.bias"].any()
    assert not want["1.linear_fc1.bias"].any()


@every_layout
def test_parameters_have_the_attributes_of_megatrons(results, layout):
    assert results[layout][2] == results["stock"][2]
    assert "partition_stride" not in results["stock"][2]["linear_fc2.bias"]


# Training


def _train(flags: list[str], config: MoEOptimConfig) -> Record:
    """Train with biases; ``extra`` holds the parameters of the experts at the end."""
    training.MODEL.remove("--disable-bias-linear")
    return pretrain(flags, config, observe=lambda model, _: experts.trained_values(model[0]))


@pytest.mark.parametrize("format", [pytest.param("bf16", marks=pytest.mark.extended), "mxfp8"])
def test_layouts_train_biases_alike_where_ranks_share_experts(format):
    """Gradients are averaged over 2 data-parallel ranks, where Megatron's own experts cannot run
    with biases; beside quantized weights biases stay bf16."""
    grouped, indexed = (
        run_ranks(2, _train, STEPS, MoEOptimConfig(format=format, expert_layout=layout))
        for layout in LAYOUTS
    )
    for mine, theirs in zip(grouped, indexed, strict=True):
        assert mine.losses == theirs.losses
        assert_same_tensors(mine.extra, theirs.extra, what="trained")
        biases = [v for n, v in mine.weights.items() if ".experts." in n and ".bias" in n]
        assert len(biases) == 2 * 2  # layers, linears
        assert all(one.dtype == torch.bfloat16 and one.any() for one in biases)
    assert_same_tensors(grouped[0].extra, grouped[1].extra, what="on the other rank")


def test_a_quantized_linear_moves_its_biases_with_its_weights():
    linear = GroupedLinear(2, 32, 32, format=MXFP8, bias=True)
    linear.load_values(torch.zeros(linear.shape, dtype=torch.bfloat16))
    before = linear.bias
    linear._apply(lambda tensor: tensor.clone() + 1 if tensor.dim() == 2 else tensor)
    assert linear.bias is before
    assert_bytes_equal(linear.bias.data, torch.ones(2, 32, dtype=torch.bfloat16))
