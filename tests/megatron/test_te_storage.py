"""Weights of Transformer Engine behind our storage: the bytes that products read are ours."""

import pytest
import torch

from moe_optim import MoEOptimConfig, ops, reference
from moe_optim.errors import StateError
from moe_optim.formats import DIRECTIONS, FP8_BLOCK, MXFP8, MXFP8_2D
from moe_optim.kernels.member_table import MemberTable, TableEntry
from moe_optim.megatron import managed
from moe_optim.megatron.te_storage import TransformerEngineStorage
from tests.support import te_stand_ins
from tests.support.bytes import assert_bytes_equal
from tests.support.inputs import wide_range_weights
from tests.support.te_stand_ins import Float8BlockwiseQTensor, MXFP8Tensor, padded_scale

KINDS = {
    "fp8_block": (Float8BlockwiseQTensor, FP8_BLOCK, (256, 384)),
    "fp8_block with partial blocks": (Float8BlockwiseQTensor, FP8_BLOCK, (144, 272)),
    "mxfp8": (MXFP8Tensor, MXFP8, (96, 160)),
    "mxfp8_2d": (MXFP8Tensor, MXFP8_2D, (96, 160)),
}
EVERY_KIND = pytest.mark.parametrize(("cls", "format", "shape"), KINDS.values(), ids=KINDS.keys())


def requantize(storage: TransformerEngineStorage, master: torch.Tensor) -> None:
    """Do what a gather does on one rank."""
    entry = TableEntry(
        parameter=storage.name,
        source=master.unsqueeze(0),
        target=storage.quantized,
        storage_scales=storage.storage_scales,
    )
    table = MemberTable.build([entry])
    ops.requantize(table)
    ops.finish_gather(table)


def assert_holds(weight, master: torch.Tensor, format) -> None:
    """Compare everything that products read with the reference."""
    want = reference.quantize(master.unsqueeze(0), format)
    assert_bytes_equal(weight._rowwise_data, want.rowwise_data[0], what="rowwise data")
    assert_bytes_equal(weight._columnwise_data, want.columnwise_data[0], what="columnwise data")
    for direction in DIRECTIONS:
        got = getattr(weight, f"_{direction}_scale_inv")
        assert_bytes_equal(got, padded_scale(want, direction), what=f"{direction} scales")


@EVERY_KIND
@pytest.mark.parametrize("bound", [False, True], ids=["in place", "in a bucket"])
def test_a_requantization_reaches_what_products_read(cls, format, shape, bound):
    """Data of both directions, and scales with their repetition and zeroed padding."""
    first, second = (wide_range_weights(*shape, seed=seed) for seed in (1, 2))
    weight = cls(format, first)
    storage = TransformerEngineStorage(weight, format)
    if bound:
        memory = {
            name: torch.full_like(plane.tensor, te_stand_ins.SPOILED)
            for name, plane in storage.planes().items()
            if name == "rowwise_data" or (name == "rowwise_scale" and format.is_2d)
        }
        storage.bind(memory)
        assert weight._rowwise_data.data_ptr() == memory["rowwise_data"].data_ptr()
        assert_holds(weight, first, format)  # binding moves the bytes and changes none
    requantize(storage, second)
    assert_holds(weight, second, format)
    assert not storage.has_moved()


def test_shared_blocks_take_one_copy_of_the_bytes():
    weight = MXFP8Tensor(MXFP8_2D, wide_range_weights(64, 64, seed=1))
    storage = TransformerEngineStorage(weight, MXFP8_2D)
    storage.bind({"rowwise_data": torch.empty(1, 64, 64, dtype=torch.uint8)})
    assert weight._columnwise_data.data_ptr() == weight._rowwise_data.data_ptr()


def test_what_is_missing_is_allocated():
    """Transformer Engine makes columnwise data on demand; products then want it there."""
    master = wide_range_weights(256, 384, seed=1)
    weight = Float8BlockwiseQTensor(FP8_BLOCK, master)
    weight._columnwise_data = weight._columnwise_scale_inv = None
    storage = TransformerEngineStorage(weight, FP8_BLOCK)
    requantize(storage, master)
    assert_holds(weight, master, FP8_BLOCK)


def test_a_copy_that_moved_is_taken_over_and_gathered_data_that_moved_is_refused():
    first, second = (wide_range_weights(256, 384, seed=seed) for seed in (1, 2))
    weight = Float8BlockwiseQTensor(FP8_BLOCK, first)
    storage = TransformerEngineStorage(weight, FP8_BLOCK)
    storage.bind({"rowwise_data": torch.empty(1, 256, 384, dtype=torch.uint8)})
    weight._columnwise_data = torch.zeros_like(weight._columnwise_data)
    assert storage.has_moved() and not storage.has_moved()
    requantize(storage, second)
    assert_holds(weight, second, FP8_BLOCK)
    weight._rowwise_data = weight._rowwise_data.clone()
    with pytest.raises(StateError, match="expected the data that its bucket gathers into"):
        storage.has_moved()


def test_gathered_columnwise_data_that_moved_is_refused():
    """In 1-D blocks both copies travel, and the gather would fill memory that nobody reads."""
    weight = MXFP8Tensor(MXFP8, wide_range_weights(64, 64, seed=1))
    storage = TransformerEngineStorage(weight, MXFP8)
    names = ("rowwise_data", "columnwise_data")
    storage.bind({name: torch.empty(1, 64, 64, dtype=torch.uint8) for name in names})
    weight._columnwise_data = weight._columnwise_data.clone()
    with pytest.raises(StateError, match="expected the data that its bucket gathers into"):
        storage.has_moved()


def test_layouts_that_are_not_known_are_refused():
    swizzled = MXFP8Tensor(MXFP8, wide_range_weights(64, 64, seed=1))
    swizzled._with_gemm_swizzled_scales = True
    with pytest.raises(StateError, match="swizzled"):
        TransformerEngineStorage(swizzled, MXFP8)
    rows = Float8BlockwiseQTensor(FP8_BLOCK, wide_range_weights(128, 128, seed=1))
    rows._is_2D_scaled = False
    with pytest.raises(StateError, match="1-D blocks"):
        TransformerEngineStorage(rows, FP8_BLOCK)


@pytest.mark.parametrize(
    ("cls", "stored", "wanted", "found"),
    [
        (Float8BlockwiseQTensor, FP8_BLOCK, "fp8_block", True),
        (Float8BlockwiseQTensor, FP8_BLOCK, "mxfp8", False),
        (MXFP8Tensor, MXFP8, "mxfp8", True),
        (MXFP8Tensor, MXFP8_2D, "mxfp8_2d", True),
        (MXFP8Tensor, MXFP8, "bf16", False),
    ],
)
def test_a_weight_is_managed_in_the_format_that_is_wanted(cls, stored, wanted, found, monkeypatch):
    config = MoEOptimConfig(format=wanted)
    monkeypatch.setattr(managed, "installed_config", lambda: config)
    weight = cls(stored, wide_range_weights(128, 128, seed=1))
    assert managed.is_managed(weight) is found
    if found:
        assert managed.storage_of(weight).format.name == wanted
        assert managed.storage_of(weight) is managed.storage_of(weight)
    monkeypatch.setattr(managed, "installed_config", lambda: None)
    assert not managed.is_managed(cls(stored, wide_range_weights(128, 128, seed=1)))
