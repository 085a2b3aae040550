"""Behind a quantized weight: buffers at fixed addresses, written whole."""

import pytest
import torch

from moe_optim.errors import LayoutError
from moe_optim.formats import DIRECTIONS, FORMATS, MXFP8, MXFP8_2D, reference
from moe_optim.weights.storage import PortableStorage, Weights
from tests.support.bytes import assert_bytes_equal
from tests.support.inputs import poisoned, wide_range_weights
from tests.support.states.buckets import bind, pointers

SHAPE = (3, 256, 128)
every_format = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS.keys())


def make_storage(format=MXFP8, seed=0, shape=SHAPE):
    storage = PortableStorage(format, shape, name="experts.weight")
    storage.write(wide_range_weights(*shape, seed=seed))
    return storage


def snapshot(storage):
    return {name: buffer.clone() for name, buffer in storage.quantized.buffers().items()}


def assert_holds(storage, buffers):
    assert storage.quantized.buffers().keys() == buffers.keys()
    for name, buffer in storage.quantized.buffers().items():
        assert_bytes_equal(buffer, buffers[name], what=name)


@every_format
def test_write_leaves_the_oracles_bytes_and_dequantize_reads_its_values_anew(format):
    storage = PortableStorage.viewing(poisoned(format, SHAPE))
    values = wide_range_weights(*SHAPE)
    storage.write(values)
    want = reference.quantize(values, format)
    assert_holds(storage, want.buffers())
    for direction in DIRECTIONS:
        read = storage.dequantize(direction)
        assert_bytes_equal(read, reference.dequantize(want, direction).bfloat16())
        read.zero_()
    assert_holds(storage, want.buffers())


@every_format
def test_an_expert_is_a_view_of_its_part(format):
    """A write to one expert changes its part of the whole to the oracle's bytes, and no other."""
    storage = make_storage(format)
    before, values = snapshot(storage), wide_range_weights(1, 256, 128, seed=1)
    expert = storage.expert(1)
    assert (expert.shape, expert.name) == ((1, 256, 128), "experts.weight1")
    expert.write(values)
    part = reference.quantize(values, format).buffers()
    for name, buffer in storage.quantized.buffers().items():
        assert_bytes_equal(buffer[1:2], part[name], what=f"{name} of expert 1")
        for other in (0, 2):
            assert_bytes_equal(buffer[other], before[name][other], what=f"{name} of {other}")
    assert pointers(storage)[0] == pointers(storage.expert(0))[0]


@every_format
def test_a_clone_is_equal_and_independent(format):
    storage = make_storage(format)
    bind(storage).is_now(Weights.STALE)
    storage.initial = torch.ones(SHAPE, dtype=torch.bfloat16)
    clone, before = storage.clone(), snapshot(storage)
    assert_holds(clone, before)
    assert (clone.name, clone.shape, clone.format) == ("experts.weight", SHAPE, format)
    assert not clone.is_fresh
    assert clone.initial is not None
    clone.write(wide_range_weights(*SHAPE, seed=1))
    clone.initial = None
    assert clone.is_fresh  # with values of its own
    assert_holds(storage, before)
    assert not storage.is_fresh
    assert storage.initial is not None


@pytest.mark.parametrize(
    "other", [make_storage(MXFP8_2D), make_storage(shape=(2, 256, 128))], ids=["format", "shape"]
)
def test_bytes_of_another_kind_are_refused(other):
    storage = make_storage()
    before = snapshot(storage)
    with pytest.raises(LayoutError, match=r"^experts\.weight: expected mxfp8 \[3, 256, 128\], got"):
        storage.copy_bytes_from(other)
    assert_holds(storage, before)


WRITES = {
    "write": lambda storage: storage.write(wide_range_weights(*SHAPE, seed=1)),
    "copy_bytes_from": lambda storage: storage.copy_bytes_from(make_storage()),
    "a gather": lambda storage: bind(storage).gather(),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_every_change_of_bytes_counts_as_a_version(write):
    storage = make_storage()
    before = storage.version
    write(storage)
    assert storage.version > before
