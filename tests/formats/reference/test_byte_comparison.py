"""The comparison that all byte tests rest on."""

import math

import pytest
import torch

from tests.support.bytes import assert_bytes_equal


def test_equal_bits_are_equal_also_for_nan():
    assert_bytes_equal(torch.tensor([math.nan, -0.0]), torch.tensor([math.nan, -0.0]))


def test_a_difference_is_counted_located_and_shown_in_hex():
    got = torch.tensor([[1, 2], [3, 0xAB]], dtype=torch.uint8)
    want = torch.tensor([[1, 2], [4, 0x0B]], dtype=torch.uint8)
    with pytest.raises(
        AssertionError,
        match=r"data: 2 of 4 elements differ, first at \[1, 0\]: got 0x03, expected 0x04",
    ):
        assert_bytes_equal(got, want, what="data")


def test_signs_of_zero_differ():
    with pytest.raises(AssertionError, match="got 0x80000000, expected 0x00000000"):
        assert_bytes_equal(torch.tensor(-0.0), torch.tensor(0.0))


def test_shape_and_dtype_must_agree():
    with pytest.raises(AssertionError, match=r"shape \[2\], expected \[2, 1\]"):
        assert_bytes_equal(torch.zeros(2), torch.zeros(2, 1))
    with pytest.raises(AssertionError, match=r"dtype torch.uint8, expected torch.int8"):
        assert_bytes_equal(torch.zeros(2, dtype=torch.uint8), torch.zeros(2, dtype=torch.int8))
