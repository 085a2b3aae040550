"""What stock Megatron saves is converted, and what is converted stock Megatron loads."""

import pytest

from moe_optim.checkpoint.files.plain_pickles import Made
from moe_optim.checkpoint.integrity import checkpoint_defect
from moe_optim.commands.conversion.comparison import compare_checkpoints, find_side
from moe_optim.commands.conversion.conversion import convert_checkpoint
from moe_optim.commands.conversion.conversion_plan import ConversionRequest, plan_conversion
from moe_optim.commands.conversion.layer_view import LayerView
from moe_optim.commands.conversion.opening import open_checkpoint
from moe_optim.experts.keys.layouts import get_layout
from tests.support.bytes import assert_bytes_equal
from tests.support.checkpoints import megatron_save
from tests.support.checkpoints.stored_checkpoints import (
    EXPERTS,
    FC1,
    FC2,
    LAYERS,
    interleaved,
    stored_tensors,
)
from tests.support.ranks import run_ranks

ITERATION = 9


@pytest.fixture(scope="module")
def experts():
    return {key: stored_tensors()[key] for key in (FC1, FC2)}


@pytest.fixture(scope="module")
def saved(experts, tmp_path_factory):
    """Two expert-parallel ranks have saved half of the experts each; gate and up rows apart."""
    folder = tmp_path_factory.mktemp("saved") / f"iter_{ITERATION:07d}"
    run_ranks(2, megatron_save.save, str(folder), experts, ITERATION)
    return folder


def view_of(path):
    return LayerView(open_checkpoint(path))


def convert(source, target, to, **request):
    asked = ConversionRequest(to=get_layout(to), **request)
    convert_checkpoint(plan_conversion(view_of(source), asked), target)
    return target


def assert_loaded(state, experts, *, stacked):
    """Every expert of every layer is what was saved, and the iteration came along."""
    for key, value in experts.items():
        for layer in range(LAYERS):
            for expert in range(EXPERTS):
                name = key if stacked else key.replace("layers.", f"layers.{layer}.")
                got = state[f"{name}.{layer}.{expert}"]
                assert_bytes_equal(got, value[layer, expert], what=f"{name} {layer} {expert}")
    assert state["iteration"] == ITERATION


def test_what_ranks_saved_is_one_model(saved, experts):
    """Pieces of two ranks, and the halves that Megatron cuts fc1 into, are put together."""
    view = view_of(saved)
    for layer in range(LAYERS):
        for linear, key in (("fc1", FC1), ("fc2", FC2)):
            shown = f"decoder.layers.{layer}.mlp.experts.linear_{linear}.weight"
            assert_bytes_equal(view.read(shown), experts[key][layer], what=shown)
    assert isinstance(view.reader.common_state["args"].state["attention_backend"], Made)
    assert view.recorded.parallel_sizes == {"expert": 2}
    assert view.recorded.glu_interleave == 0


@pytest.mark.parametrize("rows", [pytest.param(0, marks=pytest.mark.extended), 2])
def test_stock_megatron_loads_what_was_converted_there_and_back(rows, saved, experts, tmp_path):
    """Through Hugging Face's layout, one tensor a layer; and from torch_dist to torch_dist, all
    layers in one tensor. With interleaved rows, Megatron gets those rows."""
    convert(saved, tmp_path / "hf", "hf", format="safetensors")
    asked = {"format": "torch_dist", "glu_interleave": rows}
    targets = {
        False: convert(tmp_path / "hf", tmp_path / "apart", "grouped", **asked),
        True: convert(saved, tmp_path / "stacked", "indexed", **asked),
    }
    want = experts | {FC1: interleaved(experts[FC1], rows) if rows else experts[FC1]}
    for stacked, target in targets.items():
        folder = target / saved.name
        assert checkpoint_defect(folder) is None
        (state,) = run_ranks(1, _load, str(folder), experts, stacked)
        assert_loaded(state, want, stacked=stacked)
        sides = [
            find_side(view_of(path), num_experts=None, weights_only=False)
            for path in (saved, target)
        ]
        assert compare_checkpoints(*sides, lambda _: None).differences == []


def _load(folder, like, stacked):
    return megatron_save.load(folder, like, stacked=stacked)
