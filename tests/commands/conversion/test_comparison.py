"""Two checkpoints are equal when every element has the same bits, or it is said which has not."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_optim.commands.conversion.comparison import (
    compare_checkpoints,
    compare_values,
    find_side,
)
from moe_optim.commands.conversion.conversion import (
    ConversionRequest,
    convert_checkpoint,
    plan_conversion,
)
from moe_optim.commands.conversion.layer_view import LayerView
from moe_optim.commands.conversion.opening import open_checkpoint
from moe_optim.errors import LayoutError
from moe_optim.experts.keys.layouts import LAYOUTS, get_layout
from tests.support.checkpoints.stored_checkpoints import (
    EMBEDDING,
    EXPERTS,
    FC1,
    FFN,
    FLAT,
    HIDDEN,
    LAYERS,
    ROUTER,
    STATES,
    common_state,
    interleaved,
    stored_tensors,
    write_torch_dist,
)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_torch_dist(tmp_path_factory.mktemp("source") / "c", stored_tensors())


def compare(a, b, *, weights_only=False, renames=(), report=lambda _: None):
    views = [LayerView(open_checkpoint(a), renames), LayerView(open_checkpoint(b))]
    sides = [find_side(view, num_experts=EXPERTS, weights_only=weights_only) for view in views]
    return compare_checkpoints(*sides, report)


def as_layout(source, target, layout, **request):
    view = LayerView(open_checkpoint(source))
    request |= {"to": get_layout(layout), "format": "safetensors"}
    convert_checkpoint(plan_conversion(view, ConversionRequest(**request)), target)
    return target


def write(folder, tensors, **common):
    return write_torch_dist(folder, tensors, common_state(**common) if common else None)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_and_format_make_no_difference(layout, source, tmp_path):
    """Random bits, NaNs and their payloads included: all are compared, none differs."""
    done = []
    result = compare(source, as_layout(source, tmp_path / "b", layout), report=done.append)
    assert result.differences == []
    tensors = (1 + len(STATES)) * (2 * LAYERS + 2)
    assert (result.tensors, result.nbytes) == (tensors, sum(done))
    assert result.nbytes == sum(tensor.nbytes for tensor in stored_tensors().values())


def test_the_recorded_interleave_makes_no_difference_and_the_order_of_rows_does(tmp_path):
    stored = stored_tensors()
    moved = {k: interleaved(v, 4) if FC1 in k else v for k, v in stored.items()}
    plain = write(tmp_path / "a", stored)
    assert compare(plain, write(tmp_path / "b", moved, interleave=4)).differences == []
    unsaid = compare(plain, write(tmp_path / "c", moved)).differences
    assert {found.name.rpartition(".linear_")[2] for found in unsaid} == {"fc1.weight"}


@pytest.mark.parametrize(
    ("layout", "state"), [("indexed", ""), ("hf_transposed", "optimizer.state.exp_avg.")]
)
def test_one_flipped_bit_is_found_and_its_expert_named(layout, state, source, tmp_path):
    """In expert 2 of layer 1: row 3 of up is row F + 3 of fc1, whatever the layout."""
    target = as_layout(source, tmp_path / "b", "grouped")
    key = f"{state}decoder.layers.1.mlp.experts.linear_fc1.weight"
    (file,) = [path for path in target.glob("*.safetensors") if key in load_file(path)]
    tensors = load_file(file)
    bits = tensors[key].view(torch.int16)
    column = 5 * (tensors[key].dtype.itemsize // 2)
    bits[2, FFN + 3, column] ^= 1
    save_file(tensors, file, metadata={"format": "pt"})
    (found,) = compare(as_layout(source, tmp_path / "a", layout), target).differences
    assert (found.name, found.what, found.expert) == (key, "values", 2)
    assert (found.differing, found.elements) == (1, 2 * FFN * HIDDEN)
    assert found.first == (FFN + 3, 5)


def test_every_type_is_compared_bit_by_bit():
    floats = (torch.float64, torch.float8_e4m3fn, torch.complex64)
    for dtype in (*floats, torch.bool, torch.int64):
        values, other = (torch.tensor([0, 1, last, 0]).to(dtype) for last in (1, 0))
        assert compare_values("w", values, values.clone()) is None
        found = compare_values("w", values, other)
        assert (found.differing, found.first[0], found.largest) == (1, 2, 1.0), dtype


def test_nan_equals_the_same_nan_alone_and_zero_not_minus_zero():
    nan = torch.tensor([0x7FC0, 0x7FC1, 0x0000], dtype=torch.int16).view(torch.bfloat16)
    other = torch.tensor([0x7FC0, 0x7FC2, -0x8000], dtype=torch.int16).view(torch.bfloat16)
    assert compare_values("w", nan, nan.clone()) is None
    found = compare_values("w", nan, other)
    assert (found.differing, found.first, found.largest) == (2, (1,), 0.0)
    assert compare_values("w", nan[1:2], other[1:2]).largest is None


def test_other_tensors_types_and_shapes_are_differences(source, tmp_path):
    tensors = stored_tensors(states=False)
    tensors[FC1] = tensors[FC1].float()
    tensors[EMBEDDING] = tensors[EMBEDDING][:-1]
    del tensors[ROUTER]
    other = write(tmp_path / "b", tensors | {"new": torch.zeros(2)})
    differences = compare(source, other, weights_only=True).differences
    found = {(one.name, one.what, one.detail) for one in differences}
    experts = (f"decoder.layers.{layer}.mlp.experts.linear_fc1.weight" for layer in range(LAYERS))
    assert found == {
        *((key, "dtype", "torch.bfloat16 against torch.float32") for key in experts),
        (EMBEDDING, "shape", f"[32, {HIDDEN}] against [31, {HIDDEN}]"),
        (ROUTER, "only in A", ""),
        ("new", "only in B", ""),
    }


def test_flat_states_are_compared_where_they_lie_alike_and_else_left_out_aloud(tmp_path):
    weights = stored_tensors(states=False)
    flat = torch.arange(64.0)
    a = write(tmp_path / "a", weights | {FLAT: flat})
    same = compare(a, write(tmp_path / "b", weights | {FLAT: flat}))
    assert same.differences == [] and "flat" not in " ".join(same.notes)
    (found,) = compare(a, write(tmp_path / "c", weights | {FLAT: flat + 1})).differences
    assert (found.name, found.differing) == (FLAT, 64)
    (found,) = compare(a, write(tmp_path / "d", weights | {FLAT: flat.bfloat16()})).differences
    assert (found.name, found.what) == (FLAT, "dtype")
    (found,) = compare(a, write(tmp_path / "e", weights)).differences
    assert (found.name, found.what) == (FLAT, "only in A")
    by_name = {"optimizer.state.param.router": flat}
    for folder, states, differing in (
        ("f", {FLAT: flat[:32].clone()}, []),
        ("g", by_name, [*by_name]),
    ):
        other = compare(a, write(tmp_path / folder, weights | states))
        assert [one.name for one in other.differences] == differing
        assert "Flat optimizer states, 1 in all, were not compared" in other.notes[-1]


def test_rows_in_an_order_that_cannot_be_told_are_refused(source, tmp_path):
    cut = {"interleave": 4, "expert_tensor_parallel_size": 2}
    a = write(tmp_path / "a", stored_tensors(), **cut)
    assert compare(a, write(tmp_path / "b", stored_tensors(), **cut)).differences == []
    with pytest.raises(LayoutError, match="--expert-tensor-parallel-size 2"):
        compare(a, source)
