"""The vectorised reference agrees with the definitions written out one element at a time."""

import pytest
import torch

from moe_optim.formats import FORMATS
from moe_optim.formats.reference import quantize_into
from tests.formats.reference import scalar_oracle
from tests.support.bytes import assert_bytes_equal
from tests.support.inputs import normal_weights, poisoned, wide_range_weights, with_specials

SHAPES = [
    ("mxfp8", (2, 64, 96)),
    ("mxfp8_2d", (2, 64, 96)),
    ("nvfp4", (2, 48, 32)),
    *(("fp8_block", shape) for shape in [(2, 130, 20), (1, 5, 257)]),
    ("fp8_block_fp32", (2, 130, 20)),
    ("mxfp8_rows", (2, 3, 96)),
    ("mxfp4", (3, 2, 96)),
    ("nvfp4_rows", (3, 2, 80)),
    ("int4", (3, 2, 96)),
    ("int4_g128", (2, 5, 256)),
]

MASTERS = {  # special values alone: test_special_values.py
    "fresh weights": normal_weights,
    "wide range": wide_range_weights,
    "largest": lambda *shape: wide_range_weights(*shape, exponents=(118, 127)).clamp(-3e38, 3e38),
    "smallest": lambda *shape: wide_range_weights(*shape, exponents=(-149, -115)),
    "with NaN, Inf and zeros": lambda *shape: with_specials(wide_range_weights(*shape)),
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
@pytest.mark.parametrize(("name", "shape"), SHAPES, ids=str)
def test_every_byte_equals_the_scalar_definition(name, shape, master):
    """All buffers, storage poisoned before, so that a byte nobody writes shows as well."""
    weights = master(*shape)
    got = poisoned(FORMATS[name], shape)
    quantize_into(weights, FORMATS[name], got)
    want = scalar_buffers(weights, name, like=got)
    assert got.buffers().keys() == want.keys()
    for field, buffer in got.buffers().items():
        assert_bytes_equal(buffer, want[field], what=field)
