"""Runs the amax launch on the CPU, for test_amax_table.py: Triton's interpreter is global."""

from tests.kernels import interpreted  # noqa: F401, I001  # before any kernel is decorated

import torch

from moe_optim.formats import MXFP8, QuantizedWeight
from moe_optim.kernels.amax_table import AmaxTable
from moe_optim.kernels.table_entry import TableEntry
from tests.support.amax import amax_of
from tests.support.bytes import assert_bytes_equal
from tests.support.inputs import wide_range_weights, with_specials

SHAPES = ((3, 32, 96), (2, 64, 4160), (4, 32, 32), (1, 32, 32))


def check(dtype, start, end):
    """Find the amaxes of elements ``start`` to ``end`` of several weights, twice."""
    entries, wanted = [], []
    for seed, shape in enumerate(SHAPES):
        master = with_specials(wide_range_weights(*shape, seed=seed), every=1009)
        master = master.bfloat16().to(dtype)  # the interpreter does not round as a GPU does
        numel = master.numel()
        low, high = (numel * start // 60, numel * end // 60) if seed else (0, 0)
        owned = torch.zeros_like(master)
        owned.view(-1)[low:high] = master.view(-1)[low:high]
        wanted.append(amax_of(owned))
        entries.append(
            TableEntry(
                parameter=f"fc{seed}",
                source=master.view(-1)[low:high].clone(),
                target=QuantizedWeight.empty(MXFP8, shape),
                start=low,
            )
        )
    table = AmaxTable.build(entries)
    for _ in range(2):
        out = torch.full((sum(shape[0] for shape in SHAPES),), -1.0)
        table.find_into(out)
        assert_bytes_equal(out, torch.cat(wanted), what=f"{dtype} {start} {end}")


if __name__ == "__main__":
    for dtype in (torch.float32, torch.bfloat16):
        for start, end in ((0, 60), (0, 17), (17, 60), (7, 7)):
            check(dtype, start, end)
    print("every amax is plain torch's")
