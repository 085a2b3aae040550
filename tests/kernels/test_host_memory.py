"""Memory of the host is taken piece by piece, and what lies there is chosen evenly."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_optim.kernels import host_memory
from moe_optim.kernels.host_memory import HostMemory, spread

CPU = torch.device("cpu")


def test_tensors_share_segments_and_no_element(monkeypatch):
    """Whatever fits into what is left of a segment goes there; what fits into none gets its own."""
    monkeypatch.setattr(host_memory, "SEGMENT_BYTES", 4096)
    memory = HostMemory(CPU)
    shapes = {"three quarters": (3, 256), "too large": (5000,), "small": (7,), "nothing": (0,)}
    taken = {
        name: memory.take(shape, torch.bfloat16 if name == "small" else torch.float32)
        for name, shape in shapes.items()
    }
    for number, one in enumerate(taken.values()):
        one.on_device.fill_(number)
    for number, (name, shape) in enumerate(shapes.items()):
        assert taken[name].on_host.shape == shape
        assert taken[name].on_host.data_ptr() % 64 == 0
        assert (taken[name].on_host == number).all()
    segments = {one.on_host.untyped_storage().data_ptr() for one in taken.values()}
    assert len(segments) == 2
    assert memory.nbytes == 4096 + 20000


@pytest.mark.parametrize(("expected", "taken"), [(0, 2), (1000, 1024), (1024, 1024), (1025, 2048)])
def test_a_slab_is_a_power_of_two_and_no_larger_than_needed(expected, taken):
    memory = HostMemory(CPU, expected)
    memory.take((1,), torch.uint8)
    assert memory.nbytes == taken


@given(sizes=st.lists(st.integers(0, 50), max_size=40), hundredths=st.integers(0, 100))
def test_what_is_chosen_never_weighs_more_than_its_part_and_misses_it_by_less_than_one(
    sizes, hundredths
):
    """Of every beginning of the row: so it is spread evenly."""
    fraction = hundredths / 100
    chosen = spread(sizes, fraction)
    for end in range(len(sizes) + 1):
        part = fraction * sum(sizes[:end])
        weight = sum(
            size for size, is_chosen in zip(sizes[:end], chosen, strict=False) if is_chosen
        )
        assert weight <= part
        assert part - weight < max(sizes[:end], default=0) + 1
    assert chosen == [size > 0 for size in sizes] if fraction == 1 else True
    assert not any(chosen) if fraction == 0 else True
