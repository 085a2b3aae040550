"""The vectorised reference agrees with the definitions written out one element at a time."""

import math

import pytest
import torch

from moe_optim.formats import FORMATS
from moe_optim.formats.reference import quantize_into
from tests.formats.reference import scalar_oracle
from tests.support.bytes import assert_bytes_equal
from tests.support.inputs import normal_weights, poisoned, wide_range_weights, with_specials

SHAPES = {
    "mxfp8": [(2, 64, 96), (3, 32, 32), (1, 96, 64)],
    "mxfp8_2d": [(2, 64, 96), (3, 32, 32), (1, 96, 64)],
    "nvfp4": [(2, 48, 32), (3, 16, 16), (1, 32, 80)],
    "fp8_block": [(2, 130, 20), (1, 5, 257), (3, 7, 3), (1, 128, 128)],
    "fp8_block_fp32": [(2, 130, 20), (3, 7, 3)],
    "mxfp8_rows": [(2, 3, 96)],
    "mxfp4": [(2, 33, 32), (3, 1, 96)],
    "nvfp4_rows": [(2, 33, 32), (3, 1, 80)],
    "int4": [(2, 33, 32), (3, 1, 96)],
    "int4_g128": [(2, 5, 256)],
}
FORMAT_SHAPES = [(name, shape) for name, shapes in SHAPES.items() for shape in shapes]

MASTERS = {
    "fresh weights": normal_weights,
    "wide range": wide_range_weights,
    "largest": lambda *shape: wide_range_weights(*shape, exponents=(118, 127)).clamp(-3e38, 3e38),
    "smallest": lambda *shape: wide_range_weights(*shape, exponents=(-149, -115)),
    "with NaN, Inf and zeros": lambda *shape: with_specials(wide_range_weights(*shape)),
    "with NaN": lambda *shape: with_specials(wide_range_weights(*shape), specials=(math.nan,)),
    "only NaN": lambda *shape: torch.full(shape, math.nan),
    "only infinite": lambda *shape: torch.full(shape, -math.inf),
    "only zero": torch.zeros,
    "only -0.0": lambda *shape: torch.full(shape, -0.0),
    "one value": lambda *shape: torch.full(shape, 3.0),
}


def scalar_buffers(master, name, like):
    """Quantize each expert with the scalar oracle; tensors of the shapes and dtypes in ``like``."""
    buffers = {field: torch.zeros_like(buffer) for field, buffer in like.buffers().items()}
    for expert, weight in enumerate(master.tolist()):
        rounded = [[scalar_oracle.bf16(value) for value in row] for row in weight]
        for field, entries in scalar_oracle.QUANTIZE[name](rounded).items():
            if field == "global_amax":
                buffers[field][expert] = entries
                continue
            shape = buffers[field].shape[1:]
            values = [[entries[row, col] for col in range(shape[1])] for row in range(shape[0])]
            buffers[field][expert] = torch.tensor(values, dtype=buffers[field].dtype)
    return buffers


@pytest.mark.parametrize("master", MASTERS.values(), ids=MASTERS.keys())
@pytest.mark.parametrize(("name", "shape"), FORMAT_SHAPES, ids=str)
def test_every_byte_equals_the_scalar_definition(name, shape, master):
    """All buffers, storage poisoned before, so that a byte nobody writes shows as well."""
    weights = master(*shape)
    got = poisoned(FORMATS[name], shape)
    quantize_into(weights, FORMATS[name], got)
    want = scalar_buffers(weights, name, like=got)
    assert got.buffers().keys() == want.keys()
    for field, buffer in got.buffers().items():
        assert_bytes_equal(buffer, want[field], what=field)
