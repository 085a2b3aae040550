"""Gather planes: views as bytes, cut into equal slices or refused."""

from fractions import Fraction

import pytest
import torch

from moe_optim.errors import LayoutError
from moe_optim.formats import FORMATS, QuantizedWeight
from moe_optim.layout.planes import GatherPlane

BYTES_PER_ELEMENT = {  # a plane of 64 x 64 logical elements
    "bf16": (torch.zeros(64, 64, dtype=torch.bfloat16), None, Fraction(2)),
    "fp32": (torch.zeros(4096), None, Fraction(4)),
    "E4M3 data": (torch.zeros(64, 64, dtype=torch.float8_e4m3fn), None, Fraction(1)),
    "E2M1 data": (torch.zeros(64, 32, dtype=torch.uint8), 4096, Fraction(1, 2)),
    "scales of 1x32": (torch.zeros(64, 2, dtype=torch.uint8), 4096, Fraction(1, 32)),
    "scales of 32x32": (torch.zeros(2, 2, dtype=torch.uint8), 4096, Fraction(1, 1024)),
    "fp32 scales of 32x32": (torch.zeros(2, 2), 4096, Fraction(1, 256)),
}


@pytest.mark.parametrize(
    ("tensor", "numel", "expected"), BYTES_PER_ELEMENT.values(), ids=BYTES_PER_ELEMENT.keys()
)
def test_a_plane_knows_its_bytes_per_element(tensor, numel, expected):
    plane = GatherPlane.viewing("plane", tensor, numel=numel)
    assert plane.bytes_per_element == expected
    assert plane.numel == 4096
    assert plane.data.dtype == torch.uint8
    assert plane.data.shape == (tensor.nbytes,)


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS.keys())
def test_planes_of_quantized_weights_have_the_ratios_of_their_format(format):
    q = QuantizedWeight.empty(format, (2, 256, 512))
    numel = 2 * 256 * 512
    data = GatherPlane.viewing("data", q.rowwise_data, numel=numel)
    scale = GatherPlane.viewing("scale", q.rowwise_scale, numel=numel)
    assert data.bytes_per_element == format.data_bytes_per_element
    assert scale.bytes_per_element == format.scale_bytes_per_element


def test_a_plane_is_a_view():
    tensor = torch.zeros(8, dtype=torch.bfloat16)
    plane = GatherPlane.viewing("bf16", tensor)
    plane.slice_of(1, 2).view(torch.bfloat16).fill_(1.0)
    assert tensor.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert plane.data.data_ptr() == tensor.data_ptr()


def test_a_parameter_can_be_viewed():
    parameter = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    GatherPlane.viewing("weight", parameter).data.fill_(0x3F)
    assert (parameter != 0).all()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 12])
def test_slices_of_all_ranks_join_to_the_plane(size):
    plane = GatherPlane.viewing("data", torch.arange(12, dtype=torch.uint8))
    slices = [plane.slice_of(rank, size) for rank in range(size)]
    assert torch.cat(slices).tolist() == list(range(12))
    assert len({len(part) for part in slices}) == 1
    assert all(part.is_contiguous() for part in slices)


def test_a_slice_of_half_a_byte_is_refused():
    """Eight E2M1 elements divide among eight ranks, their four bytes do not."""
    plane = GatherPlane.viewing("rowwise_data", torch.zeros(4, dtype=torch.uint8), numel=8)
    assert plane.slice_of(3, 4).shape == (1,)
    with pytest.raises(
        LayoutError,
        match=r"plane rowwise_data: expected whole bytes for each of 8 ranks, got 4 bytes "
        r"\(8 elements at 1/2 bytes\)",
    ):
        plane.slice_of(0, 8)


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_that_is_none_is_refused(rank, size):
    plane = GatherPlane.viewing("data", torch.zeros(4, dtype=torch.uint8))
    with pytest.raises(LayoutError, match=f"expected a rank below {size}, got {rank}"):
        plane.slice_of(rank, size)


def test_only_contiguous_bytes_of_whole_elements_make_a_plane():
    with pytest.raises(LayoutError, match=r"plane x: expected a contiguous tensor, got \[4, 4\]"):
        GatherPlane.viewing("x", torch.zeros(4, 4).t())
    with pytest.raises(LayoutError, match=r"plane x: expected at least one element, got 0"):
        GatherPlane.viewing("x", torch.zeros(0))
    with pytest.raises(LayoutError, match=r"expected contiguous bytes .* got \[4\] torch.float32"):
        GatherPlane(name="x", bytes_per_element=Fraction(4), data=torch.zeros(4))
    with pytest.raises(LayoutError, match="a whole number of elements, got 3 bytes at 2 bytes"):
        data = torch.zeros(3, dtype=torch.uint8)
        GatherPlane(name="x", bytes_per_element=Fraction(2), data=data)
