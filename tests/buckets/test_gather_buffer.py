"""Gather buffers: views as bytes, cut into equal slices or refused."""

from fractions import Fraction

import pytest
import torch

from moe_optim.buckets.gather_buffer import GatherBuffer
from moe_optim.errors import LayoutError
from moe_optim.formats import FORMATS, QuantizedWeight


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_a_buffer_knows_its_bytes_per_element(dtype):
    tensor = torch.zeros(64, 64, dtype=dtype)
    buffer = GatherBuffer.viewing("buffer", tensor)
    assert buffer.bytes_per_element == dtype.itemsize
    assert buffer.numel == 4096
    assert buffer.data.dtype == torch.uint8
    assert buffer.data.shape == (tensor.nbytes,)


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS.keys())
def test_buffers_of_quantized_weights_have_the_ratios_of_their_format(format):
    q = QuantizedWeight.empty(format, (2, 256, 512))
    numel = 2 * 256 * 512
    assert q.rowwise_data.nbytes == format.data_bytes_per_element * numel
    assert q.rowwise_scale.nbytes == format.scale_bytes_per_element * numel


def test_a_buffer_is_a_view():
    tensor = torch.zeros(8, dtype=torch.bfloat16)
    buffer = GatherBuffer.viewing("bf16", tensor)
    buffer.slice_of(1, 2).view(torch.bfloat16).fill_(1.0)
    assert tensor.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert buffer.data.data_ptr() == tensor.data_ptr()


def test_a_parameter_can_be_viewed():
    parameter = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    GatherBuffer.viewing("weight", parameter).data.fill_(0x3F)
    assert (parameter != 0).all()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 12])
def test_slices_of_all_ranks_join_to_the_buffer(size):
    buffer = GatherBuffer.viewing("data", torch.arange(12, dtype=torch.uint8))
    slices = [buffer.slice_of(rank, size) for rank in range(size)]
    assert torch.cat(slices).tolist() == list(range(12))
    assert len({len(part) for part in slices}) == 1
    assert all(part.is_contiguous() for part in slices)


def test_a_slice_of_half_a_byte_is_refused():
    """Eight E2M1 elements divide among eight ranks, their four bytes do not."""
    data = torch.zeros(4, dtype=torch.uint8)
    buffer = GatherBuffer(name="rowwise_data", bytes_per_element=Fraction(1, 2), data=data)
    assert buffer.slice_of(3, 4).shape == (1,)
    with pytest.raises(
        LayoutError,
        match=r"buffer rowwise_data: expected whole bytes for each of 8 ranks, got 4 bytes "
        r"\(8 elements at 1/2 bytes\)",
    ):
        buffer.slice_of(0, 8)


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_that_is_none_is_refused(rank, size):
    buffer = GatherBuffer.viewing("data", torch.zeros(4, dtype=torch.uint8))
    with pytest.raises(LayoutError, match=f"expected a rank below {size}, got {rank}"):
        buffer.slice_of(rank, size)


def test_only_contiguous_bytes_of_whole_elements_make_a_buffer():
    with pytest.raises(LayoutError, match=r"buffer x: expected a contiguous tensor, got \[4, 4\]"):
        GatherBuffer.viewing("x", torch.zeros(4, 4).t())
    with pytest.raises(LayoutError, match=r"buffer x: expected at least one element, got 0"):
        GatherBuffer.viewing("x", torch.zeros(0))
    with pytest.raises(LayoutError, match=r"expected contiguous bytes .* got \[4\] torch.float32"):
        GatherBuffer(name="x", bytes_per_element=Fraction(4), data=torch.zeros(4))
    with pytest.raises(LayoutError, match="a whole number of elements, got 3 bytes at 2 bytes"):
        data = torch.zeros(3, dtype=torch.uint8)
        GatherBuffer(name="x", bytes_per_element=Fraction(2), data=data)
