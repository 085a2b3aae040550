"""``param_data`` of quantized weights: every byte leaves and comes back, whoever calls for it."""

import pytest
import torch

from moe_optim.buckets.offload import ParamData
from moe_optim.errors import StateError
from moe_optim.formats import FORMATS
from moe_optim.weights.storage import PortableStorage
from tests.support.bytes import assert_bytes_equal
from tests.support.inputs import wide_range_weights
from tests.support.ranks import on_ranks
from tests.support.states import life_cycle
from tests.support.states.making_room import managed_buffers


def storages_of(format):
    """Return weights of two shapes, the experts of one apart: views of one memory."""
    first, second = (PortableStorage(format, shape) for shape in ((2, 128, 256), (3, 256, 128)))
    for seed, storage in enumerate((first, second)):
        storage.write(wide_range_weights(*storage.shape, seed=seed))
    return [first, *(second.expert(index) for index in range(3))]


def buffers_of(storages):
    return [buffer for one in storages for buffer in one.quantized.buffers().values()]


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_every_byte_leaves_and_comes_back(format):
    """Memory that several buffers share is counted and copied once."""
    storages = storages_of(format)
    buffers = buffers_of(storages)
    before = [buffer.clone() for buffer in buffers]
    data = ParamData(storages)
    size = data.storage().size()
    assert size == sum({m.data_ptr(): m.nbytes() for s in storages for m in s.memories()}.values())
    on_host = data.cpu()
    assert on_host.storage().size() == size
    data.storage().resize_(0)
    assert data.storage().size() == 0
    assert not any(buffer.untyped_storage().nbytes() for buffer in buffers)
    data.storage().resize_(size)
    data.copy_(on_host)
    for buffer, old in zip(buffers_of(storages), before, strict=True):
        assert_bytes_equal(buffer, old)


def test_what_it_cannot_be_asked_for_is_refused():
    data = ParamData(storages_of(FORMATS["mxfp8"]))
    size, on_host = data.size(), data.cpu()
    data.resize_(size)  # which it has
    with pytest.raises(StateError, match=f"expected a resize to 0 or {size} bytes, got 7"):
        data.resize_(7)
    with pytest.raises(StateError, match="expected weights on the host to copy back, got weights"):
        data.copy_(on_host)
    data.resize_(0)
    data.resize_(0)
    with pytest.raises(StateError, match="expected bytes to copy, got none: they are on the host"):
        data.cpu()
    with pytest.raises(StateError, match="expected a resize to 0 or"):
        data.resize_(size + 1)
    with pytest.raises(RuntimeError):
        data.copy_(on_host)  # without memory to fill
    data.resize_(size)
    data.copy_(on_host)
    assert torch.equal(data.cpu(), on_host)


@on_ranks(1)
def test_weights_do_not_leave_in_the_middle_of_a_step():
    """Ask for the memory of weights whose masters are moving."""
    life_cycle.initialize()
    cycle = life_cycle.LifeCycle(step="fused")
    (buffer, *_) = managed_buffers([cycle.ddp])
    size = buffer.param_data.size()
    part = cycle.optimizer.chained_optimizers[0]
    with part.updating():
        try:
            buffer.param_data.storage().resize_(0)
        except StateError as error:
            said = str(error)
    found = {
        "said": said,
        "kept": buffer.param_data.size() == size,
        "cached": buffer.param_data_cpu,
    }
    assert "Offload between two steps." in found["said"]
    assert found["kept"] and found["cached"] is None
