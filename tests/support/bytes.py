"""Comparison of tensors byte by byte."""

import torch


def assert_bytes_equal(got, want, what="tensor"):
    """Fail unless dtype, shape and every bit agree; NaN equals itself and 0.0 is not -0.0.

    The message says how many elements differ, where the first one lies, and both values in hex.
    """
    assert got.dtype == want.dtype, f"{what}: dtype {got.dtype}, expected {want.dtype}"
    assert got.shape == want.shape, f"{what}: shape {list(got.shape)}, expected {list(want.shape)}"
    got_bits, want_bits = _as_integers(got), _as_integers(want)
    differs = got_bits != want_bits
    if not differs.any():
        return
    index = tuple(differs.nonzero()[0].tolist())
    digits = 2 * got.element_size()
    mask = (1 << 4 * digits) - 1
    got_hex = f"0x{int(got_bits[index]) & mask:0{digits}X}"
    want_hex = f"0x{int(want_bits[index]) & mask:0{digits}X}"
    raise AssertionError(
        f"{what}: {int(differs.sum())} of {got.numel()} elements differ, "
        f"first at {list(index)}: got {got_hex}, expected {want_hex}"
    )


def assert_same_tensors(got, want, *, what="tensor"):
    """Fail unless two dictionaries hold the same names and the same bytes."""
    assert got.keys() == want.keys(), what
    for name in got:
        assert_bytes_equal(got[name], want[name], what=f"{what} {name}")


def assert_values_equal(got, want, what="tensor"):
    """Fail unless every bit agrees, whatever sign and payload a NaN has."""
    got, want = (torch.where(one.isnan(), torch.nan, one) for one in (got, want))
    assert_bytes_equal(got, want, what)


def _as_integers(tensor):
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().cpu().contiguous().view(widths[tensor.element_size()])
