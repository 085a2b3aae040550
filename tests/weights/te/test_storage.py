"""Weights of Transformer Engine behind our storage: the bytes that products read are ours."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_optim import MoEOptimConfig
from moe_optim.buckets.layout import side_by_side
from moe_optim.errors import ConfigError, StateError
from moe_optim.experts.grouped_linear import GroupedLinear
from moe_optim.formats import (
    DIRECTIONS,
    FP8_BLOCK,
    FP8_BLOCK_FP32,
    MXFP8,
    MXFP8_2D,
    NVFP4,
    BlockScaledFormat,
    reference,
)
from moe_optim.kernels.member_table import MemberTable, TableEntry
from moe_optim.weights import managed
from moe_optim.weights.grouped_weight import GroupedWeight
from moe_optim.weights.te import storage as te_weights
from moe_optim.weights.te.fields import GROUPED, ONE, names_of, read_values, te_formats_of
from moe_optim.weights.te.storage import TransformerEngineStorage
from tests.support.bytes import assert_bytes_equal
from tests.support.inputs import wide_range_weights
from tests.support.ranks import on_ranks
from tests.support.states.buckets import bind, make_bucket, own_masters
from tests.support.te import te_stand_ins
from tests.support.te.te_stand_ins import (
    Float8BlockwiseQTensor,
    GroupedTensor,
    MXFP8Tensor,
    NVFP4Tensor,
    padded_scale,
)


@dataclass(frozen=True)
class Kind:
    """A class of Transformer Engine's, what it holds, and in which shape."""

    cls: type
    format: BlockScaledFormat
    shape: tuple[int, int]
    experts: int | None = None
    """Of a group; None for a weight of its own."""

    def masters(self, seed: int) -> torch.Tensor:
        """Return values [E, R, C]."""
        seeds = range(100 * seed, 100 * seed + (self.experts or 1))
        return torch.stack([wide_range_weights(*self.shape, seed=one) for one in seeds])

    def weight(self, masters: torch.Tensor) -> Any:
        if self.experts:
            return GroupedTensor(self.cls, self.format, masters)
        return self.cls(self.format, masters[0])


KINDS = {
    "fp8_block": Kind(Float8BlockwiseQTensor, FP8_BLOCK, (256, 384)),
    "fp8_block with partial blocks": Kind(Float8BlockwiseQTensor, FP8_BLOCK, (144, 272)),
    "fp8_block_fp32": Kind(Float8BlockwiseQTensor, FP8_BLOCK_FP32, (144, 272)),
    "mxfp8": Kind(MXFP8Tensor, MXFP8, (96, 160)),
    "mxfp8_2d": Kind(MXFP8Tensor, MXFP8_2D, (96, 160)),
    "nvfp4": Kind(NVFP4Tensor, NVFP4, (144, 80)),
    "group of fp8_block": Kind(Float8BlockwiseQTensor, FP8_BLOCK, (144, 272), 3),
    "group of fp8_block_fp32": Kind(Float8BlockwiseQTensor, FP8_BLOCK_FP32, (144, 272), 3),
    "group of mxfp8": Kind(MXFP8Tensor, MXFP8, (96, 160), 3),
    "group of mxfp8_2d": Kind(MXFP8Tensor, MXFP8_2D, (96, 160), 3),
    "group of nvfp4": Kind(NVFP4Tensor, NVFP4, (144, 80), 3),
}
EVERY_KIND = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())


def requantize(storage: TransformerEngineStorage, masters: torch.Tensor) -> None:
    """Do what a gather does on one rank; ``masters`` are [E, R, C]."""
    entry = TableEntry(
        parameter=storage.name,
        source=masters,
        target=storage.quantized,
        storage_scales=storage.storage_scales,
    )
    table = MemberTable.build([entry])
    table.launch()
    table.finish.launch()


def assert_holds(weight: Any, master: torch.Tensor, format: BlockScaledFormat) -> None:
    """Compare everything that products read of one weight with the reference of [R, C]."""
    want = reference.quantize(master.unsqueeze(0), format)
    for direction in DIRECTIONS:
        expected = {
            f"_{direction}_data": want.data(direction)[0],
            f"_{direction}_scale_inv": padded_scale(want, direction),
        }
        if format.has_global_amax:
            expected[f"_amax_{direction}"] = want.global_amax
        for field, value in expected.items():
            assert_bytes_equal(getattr(weight, field).cpu(), value, what=field)


def assert_all_hold(weight: Any, masters: torch.Tensor, format: BlockScaledFormat) -> None:
    """The same of a weight, or of a group: its members, and its own flat tensors."""
    if not hasattr(weight, "quantized_tensors"):
        assert_holds(weight, masters[0], format)
        return
    for member, master in zip(weight.quantized_tensors, masters, strict=True):
        assert_holds(member, master, format)
    for ours, theirs in {
        "rowwise_data": "_rowwise_data",
        "columnwise_data": "_columnwise_data",
        "scale_inv": "_rowwise_scale_inv",
        "columnwise_scale_inv": "_columnwise_scale_inv",
    }.items():
        flat = torch.cat([getattr(one, theirs).reshape(-1) for one in weight.quantized_tensors])
        assert_bytes_equal(getattr(weight, ours), flat, what=ours)
        first = getattr(weight.quantized_tensors[0], theirs)
        assert getattr(weight, ours).data_ptr() == first.data_ptr()  # the same memory


def bucket_memory(storage: TransformerEngineStorage) -> dict[str, torch.Tensor]:
    """Return memory for the buffers that travel, full of what must not stay there."""
    format = storage.format
    travelling = ["rowwise_data", "rowwise_scale"] if format.is_2d else ["rowwise_data"]
    travelling += [] if format.is_2d else ["columnwise_data", "columnwise_scale"]
    travelling += ["global_amax"] if format.has_global_amax else []
    return {
        name: torch.full_like(buffer, te_stand_ins.SPOILED)
        for name, buffer in storage.quantized.buffers().items()
        if name in travelling
    }


def assert_takes_over(storage: TransformerEngineStorage) -> None:
    """It notices that it was given something else, as often as it is asked, and takes it once."""
    assert storage.has_moved() and storage.has_moved()
    storage.take_over()
    assert not storage.has_moved()


@EVERY_KIND
@pytest.mark.parametrize("bound", [False, True], ids=["in place", "in a bucket"])
def test_a_requantization_reaches_what_products_read(kind, bound):
    """Data of both directions, scales with their repetition and zeroed padding, which Transformer
    Engine leaves unwritten in a group, and amaxes; of a group, its own tensors and those of its
    members. A quantizer of one direction, which Transformer Engine sets as it needs it, changes
    nothing, and decides on the scales of the format."""
    first, second = kind.masters(1), kind.masters(2)
    weight = kind.weight(first)
    for one in getattr(weight, "quantized_tensors", [weight]):
        for direction in DIRECTIONS:
            scale = getattr(one, f"_{direction}_scale_inv")
            scale[scale == 0] = 7  # no scale of these masters is zero
    quantizer = weight.quantizer if kind.experts else weight._quantizer
    quantizer.rowwise_usage, quantizer.columnwise_usage = True, False
    storage = TransformerEngineStorage(weight, kind.format)
    assert_all_hold(weight, first, kind.format)
    if bound:
        memory = bucket_memory(storage)
        bind(storage, memory)
        assert storage.quantized.rowwise_data is memory["rowwise_data"]
        assert_all_hold(weight, first, kind.format)  # binding moves the bytes and changes none
    requantize(storage, second)
    assert_all_hold(weight, second, kind.format)
    assert not storage.has_moved()
    for one in (weight, *getattr(weight, "quantized_tensors", [])):
        formats = te_formats_of(one)
        assert kind.format in formats
        assert {format.scale_encoding for format in formats} == {kind.format.scale_encoding}


@EVERY_KIND
def test_bytes_and_values_are_written_and_read_as_those_of_portable_weights(kind):
    first, second = kind.masters(1), kind.masters(2)
    weight = kind.weight(first)
    storage = TransformerEngineStorage(weight, kind.format)
    copy = storage.clone()
    storage.write(second)
    assert_all_hold(weight, second, kind.format)
    for direction in DIRECTIONS:
        want = reference.dequantize(reference.quantize(second, kind.format), direction)
        got = storage.dequantize(direction)
        assert_bytes_equal(got, want.bfloat16().reshape(got.shape), what=direction)
    storage.copy_bytes_from(copy)
    assert_all_hold(weight, first, kind.format)


def test_what_is_missing_is_allocated():
    """Transformer Engine makes columnwise data on demand; products then want it there."""
    master = wide_range_weights(256, 384, seed=1)
    weight = Float8BlockwiseQTensor(FP8_BLOCK, master)
    weight._columnwise_data = weight._columnwise_scale_inv = None
    storage = TransformerEngineStorage(weight, FP8_BLOCK)
    requantize(storage, master.unsqueeze(0))
    assert_holds(weight, master, FP8_BLOCK)


def test_a_copy_that_moved_is_taken_over_and_gathered_data_that_moved_is_refused():
    first, second = (wide_range_weights(256, 384, seed=seed) for seed in (1, 2))
    weight = Float8BlockwiseQTensor(FP8_BLOCK, first)
    storage = TransformerEngineStorage(weight, FP8_BLOCK)
    bind(storage, {"rowwise_data": torch.empty(1, 256, 384, dtype=torch.uint8)})
    weight._columnwise_data = torch.zeros_like(weight._columnwise_data)
    assert_takes_over(storage)
    requantize(storage, second.unsqueeze(0))
    assert_holds(weight, second, FP8_BLOCK)
    weight._rowwise_data = weight._rowwise_data.clone()
    with pytest.raises(StateError, match="expected the data that its bucket gathers into"):
        storage.take_over()


@pytest.mark.parametrize("name", ["group of mxfp8", "group of nvfp4"])
def test_members_that_are_made_anew_are_pointed_at_the_group_again(name):
    """Transformer Engine may cut a group into members at any time; from its fields, so they fit.
    Members that hold other memory would be stale from the next gather on."""
    kind = KINDS[name]
    first, second = kind.masters(1), kind.masters(2)
    weight = kind.weight(first)
    storage = TransformerEngineStorage(weight, kind.format)
    bind(storage, bucket_memory(storage))
    stray = kind.weight(first).quantized_tensors
    weight.quantized_tensors = stray
    assert_takes_over(storage)
    requantize(storage, second)
    assert_all_hold(weight, second, kind.format)


def test_an_amax_that_moved_is_pointed_back():
    """Whoever copies a weight of NVFP4 gives the copy its own amax; gathers write ours."""
    weight = NVFP4Tensor(NVFP4, wide_range_weights(64, 64, seed=1))
    storage = TransformerEngineStorage(weight, NVFP4)
    weight._amax_columnwise = weight._amax_columnwise.clone()
    assert_takes_over(storage)
    second = wide_range_weights(64, 64, seed=2)
    requantize(storage, second.unsqueeze(0))
    assert_holds(weight, second, NVFP4)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "group of mxfp8"])
def test_scales_that_were_put_in_the_order_of_products_are_plain_after_the_next_gather(name):
    """A gather writes them in plain order, and a flag that says otherwise would have products read
    them wrongly. What lay in the padding meanwhile is zero again."""
    kind = KINDS[name]
    weight = kind.weight(kind.masters(1))
    storage = TransformerEngineStorage(weight, kind.format)
    buckets = [weight, *getattr(weight, "quantized_tensors", [])]
    for one in buckets:
        one._with_gemm_swizzled_scales = True
    for scale in storage.storage_scales.values():
        scale.fill_(7)
    assert_takes_over(storage)
    assert not any(one._with_gemm_swizzled_scales for one in buckets)
    second = kind.masters(2)
    requantize(storage, second)
    assert_all_hold(weight, second, kind.format)


E5M2 = SimpleNamespace(name="kFloat8E5M2")
FOREIGN = [  # of a quantizer: what makes other bytes than the format's, or reads them otherwise
    ("fp8_block", "amax_epsilon", 1e-6, "an amax of 1e-06 at least"),
    ("fp8_block_fp32", "amax_epsilon", 1e-6, "an amax of 1e-06 at least"),
    ("fp8_block", "block_scaling_dim", 1, r"blocks of one row \(1-D\)"),
    ("fp8_block", "block_len", 64, "blocks of 64"),
    ("fp8_block", "dtype", E5M2, "elements of kFloat8E5M2"),
    ("mxfp8", "dtype", E5M2, "elements of kFloat8E5M2"),
    ("nvfp4", "with_2d_quantization", False, r"blocks of one row \(1-D\)"),
    ("nvfp4", "with_rht", True, "a Hadamard transform"),
    ("nvfp4", "stochastic_rounding", True, "stochastic rounding"),
    ("nvfp4", "with_amax_reduction", True, "an amax of several ranks"),
    ("nvfp4", "amax_reduction_group", "data parallel", "an amax of several ranks"),
    ("nvfp4", "row_scaled_nvfp4", True, "an amax per row"),
    ("nvfp4", "nvfp4_use_4over6", True, "four-over-six blocks"),
    ("nvfp4", "nvfp4_e4m3_max", 256, "block scales up to 256"),
]
OF_WEIGHTS = [
    ("mxfp8", "_with_gemm_swizzled_scales", True, "swizzled"),
    ("group of mxfp8", "_with_gemm_swizzled_scales", True, "swizzled"),
    ("fp8_block", "_is_2D_scaled", False, r"1-D"),
    ("nvfp4", "_row_scaled_nvfp4", True, "an amax per row"),
    ("nvfp4", "_nvfp4_use_4over6", True, "four-over-six"),
    ("fp8_block", "_fp8_dtype", E5M2, "elements of kFloat8E5M2"),
    ("mxfp8", "_fp8_dtype", E5M2, "elements of kFloat8E5M2"),
    ("nvfp4", "_nvfp4_e4m3_max", 256, "block scales up to 256"),
    ("nvfp4", "amax_reduction_group", "data parallel", "an amax of several ranks"),
    ("mxfp8", "dtype", torch.float16, "values of torch.float16"),
    ("fp8_block_fp32", "dtype", torch.float32, "values of torch.float32"),
]


@pytest.mark.parametrize("group", ["", "group of "], ids=["one", "group"])
@pytest.mark.parametrize(("kind", "field", "value", "message"), FOREIGN)
def test_a_quantizer_that_makes_other_bytes_is_refused_by_what_it_does(
    group, kind, field, value, message
):
    """Ours would be written over them at the first gather. Their values are not read, either."""
    kind = KINDS[group + kind]
    weight = kind.weight(kind.masters(1))
    setattr(weight.quantizer if group else weight._quantizer, field, value)
    with pytest.raises(StateError, match=message):
        TransformerEngineStorage(weight, kind.format)
    with pytest.raises(StateError, match=message):
        read_values(weight)


@pytest.mark.parametrize(("kind", "field", "value", "message"), OF_WEIGHTS)
def test_a_weight_of_other_bytes_or_layout_is_refused(kind, field, value, message):
    weight = KINDS[kind].weight(KINDS[kind].masters(1))
    setattr(weight, field, value)
    with pytest.raises(StateError, match=message):
        TransformerEngineStorage(weight, KINDS[kind].format)
    with pytest.raises(StateError, match=message):
        read_values(weight)


@pytest.mark.parametrize(
    ("kind", "format", "message"),
    [
        ("mxfp8", MXFP8_2D, r"blocks of one row \(1-D\)"),
        ("mxfp8_2d", MXFP8, r"square blocks"),
        ("fp8_block", FP8_BLOCK_FP32, r"scales that are powers of two \(force_pow_2_scales=True\)"),
        ("fp8_block_fp32", FP8_BLOCK, r"scales of any mantissa \(force_pow_2_scales=False\)"),
    ],
)
def test_a_quantizer_of_other_blocks_or_scales_is_refused(kind, format, message):
    """A later ``copy_`` would put its blocks where ours are expected."""
    for name in (kind, f"group of {kind}"):
        weight = KINDS[name].weight(KINDS[name].masters(1))
        with pytest.raises(StateError, match=message):
            TransformerEngineStorage(weight, format)


def test_a_group_without_data_is_refused():
    weight = KINDS["group of mxfp8"].weight(KINDS["group of mxfp8"].masters(1))
    weight.rowwise_data = None
    with pytest.raises(StateError, match="no rowwise data"):
        TransformerEngineStorage(weight, MXFP8)


@pytest.mark.parametrize(
    ("kind", "wanted", "found"),
    [
        ("fp8_block", "fp8_block", True),
        ("fp8_block", "fp8_block_fp32", False),
        ("fp8_block_fp32", "fp8_block_fp32", True),
        ("fp8_block_fp32", "fp8_block", False),
        ("group of fp8_block_fp32", "fp8_block_fp32", True),
        ("fp8_block", "mxfp8", False),
        ("mxfp8", "mxfp8", True),
        ("mxfp8_2d", "mxfp8_2d", True),
        ("nvfp4", "nvfp4", True),
        ("group of nvfp4", "nvfp4", True),
        ("group of mxfp8_2d", "mxfp8_2d", True),
        ("group of fp8_block", "nvfp4", False),
        ("mxfp8", "bf16", False),
    ],
)
def test_a_weight_is_managed_in_the_format_that_is_wanted(kind, wanted, found, monkeypatch):
    config = MoEOptimConfig(format=wanted)
    monkeypatch.setattr(managed, "installed_config", lambda: config)
    weight = KINDS[kind].weight(KINDS[kind].masters(1))
    assert managed.is_managed(weight) is found
    if found:
        assert managed.storage_of(weight).format.name == wanted
        assert managed.storage_of(weight) is managed.storage_of(weight)
    if KINDS[kind].experts:  # in high precision
        weight = KINDS[kind].weight(KINDS[kind].masters(1))
        weight.quantizer = None
        assert not managed.is_managed(weight)
    monkeypatch.setattr(managed, "installed_config", lambda: None)
    assert not managed.is_managed(KINDS[kind].weight(KINDS[kind].masters(1)))


def test_its_classes_are_asked_for_where_it_cannot_be_imported(monkeypatch):
    monkeypatch.setattr(te_weights, "import_error", lambda: "ImportError: no GPU")
    with pytest.raises(ConfigError, match=r"got ImportError: no GPU\. Install it, or set storage:"):
        GroupedLinear(2, 64, 64, format=MXFP8, make_storages=te_weights.make_te_storages)


@EVERY_KIND
def test_initial_values_stay_what_masters_start_from_while_the_bytes_are_theirs(kind: Kind):
    weight = kind.weight(kind.masters(1))
    storage, initial = (
        TransformerEngineStorage(weight, kind.format),
        weight._high_precision_init_val,
    )
    assert not storage.renew_initial()
    assert storage.initial is initial
    storage.initial = None
    assert not storage.renew_initial()
    assert storage.initial is None


OVERWRITTEN = {
    "other values": lambda masters, other: other,
    "a tenth more": lambda masters, _: 1.1 * masters,
    "another last expert": lambda masters, other: torch.cat([masters[:-1], other[-1:]]),
}


@EVERY_KIND
@pytest.mark.parametrize("change", OVERWRITTEN.values(), ids=OVERWRITTEN.keys())
def test_initial_values_that_were_overwritten_give_way_to_what_the_bytes_stand_for(
    kind: Kind, change: Any
):
    """Weights loaded after they were made, of which Transformer Engine keeps the first values."""
    masters, other = kind.masters(1), kind.masters(2)
    weight = kind.weight(masters)
    storage, shape = TransformerEngineStorage(weight, kind.format), weight.shape
    storage.write(change(masters, other))
    assert storage.renew_initial()
    assert_bytes_equal(weight._high_precision_init_val, storage.dequantize().view(shape))
    assert not storage.renew_initial()


@pytest.mark.parametrize("format", [MXFP8, FP8_BLOCK], ids=lambda format: format.name)
def test_initial_values_give_way_to_bytes_that_are_no_numbers(format):
    """A NaN that somebody loaded is found where masters are, and not hidden by values of before."""
    cls = MXFP8Tensor if format is MXFP8 else Float8BlockwiseQTensor
    weight = cls(format, wide_range_weights(128, 128, seed=1))
    storage = TransformerEngineStorage(weight, format)
    weight._rowwise_data[3, 5] = 0x7F
    assert storage.renew_initial()
    assert weight._high_precision_init_val.isnan().nonzero().tolist() == [[3, 5]]


@EVERY_KIND
def test_values_that_the_weight_itself_was_given_count_as_overwriting(kind: Kind):
    """Its own ``copy_`` writes bytes and scales where products read them, and knows no storage."""
    weight, other = kind.weight(kind.masters(1)), kind.weight(1000 * kind.masters(2))
    storage = TransformerEngineStorage(weight, kind.format)
    fields = GROUPED if kind.experts else ONE
    for name in names_of(kind.format):
        mine = getattr(weight, fields[name])
        mine.copy_(getattr(other, fields[name]).view(mine.shape))
    assert storage.renew_initial()
    assert_bytes_equal(weight._high_precision_init_val, read_values(other))


@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize("name", ["_columnwise_data", "_rowwise_scale_inv"])
def test_a_bucket_finds_the_weight_of_many_that_was_given_another_tensor(name, index):
    """It asks all weights together, and takes over the one; a gather then reaches the tensor."""
    firsts, seconds = (
        [wide_range_weights(128, 256, seed=seed + i) for i in range(3)] for seed in (1, 7)
    )
    weights = [Float8BlockwiseQTensor(FP8_BLOCK, master) for master in firsts]
    for weight in weights:
        weight.quantized_storage = TransformerEngineStorage(weight, FP8_BLOCK)
    slots = side_by_side([(1, 128, 256)] * 3)
    masters = own_masters(weights, slots, seconds, 0, slots[-1].end)
    bucket = make_bucket(weights, slots, torch.zeros(slots[-1].end), masters=masters)
    for given in (False, True):
        if given:
            setattr(weights[index], name, getattr(weights[index], name).clone())
        bucket.settle(encoded=False)
        bucket.open_gather()
        bucket.gather.encode()
        bucket.finish()
        for weight, master in zip(weights, seconds, strict=True):
            assert_holds(weight, master, FP8_BLOCK)


@on_ranks(2)
def test_a_broadcast_leaves_every_rank_with_the_bytes_of_the_first():
    """Of square blocks too, whose columnwise scales are the others seen the other way round: no
    collective takes such memory."""
    dist.init_process_group("gloo")
    for kind in KINDS.values():
        weight = kind.weight(kind.masters(1 + dist.get_rank()))
        managed_weight = GroupedWeight(TransformerEngineStorage(weight, kind.format))
        dist.broadcast(managed_weight.data, src=0)
        assert_all_hold(weight, kind.masters(1), kind.format)
