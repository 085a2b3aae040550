"""The launch that finds the amax of experts of any format, without a GPU."""

import pytest
import torch

from moe_optim.errors import LayoutError
from moe_optim.formats import MXFP8, QuantizedWeight
from moe_optim.kernels.amax import plan_amaxes
from moe_optim.kernels.table_entry import TableEntry
from tests.support.bytes import assert_bytes_equal
from tests.support.inputs import wide_range_weights, with_specials
from tests.support.modules.amax import amax_of

SHAPES = ((3, 32, 96), (2, 64, 4160), (4, 32, 32), (1, 32, 32))
FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("start", "end", "dtype"),  # in sixtieths of a weight
    [(0, 60, FP32), (0, 17, BF16), (17, 60, FP32), (7, 7, BF16)],
    ids=["whole weights", "the first part", "the rest", "nothing"],
)
def test_every_amax_is_plain_torchs(start, end, dtype, launches):
    """Experts in one part and in many, special values, a weight of which nothing is owned, and a
    table that owns nothing; again without building."""
    entries, wanted = [], []
    for seed, shape in enumerate(SHAPES):
        master = with_specials(wide_range_weights(*shape, seed=seed), every=1009).to(dtype)
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
    amaxes = torch.empty(sum(shape[0] for shape in SHAPES))
    table = plan_amaxes(entries, amaxes)
    for _ in range(2):
        amaxes.fill_(-1)
        table.launch()
        assert_bytes_equal(amaxes, torch.cat(wanted), what="amax")
    assert launches or start == end


@pytest.mark.parametrize(("first", "aligned"), [(0, True), (2, False), (8, True)])
def test_ranges_are_aligned_that_start_at_multiples_of_16_bytes(first, aligned, launches):
    """Of bf16, where the expert itself starts at one and only a part of it is owned."""
    whole = torch.zeros(32 * 32, dtype=torch.bfloat16)
    assert whole.data_ptr() % 16 == 0
    entry = TableEntry(
        parameter="fc",
        source=whole[first:],
        target=QuantizedWeight.empty(MXFP8, (1, 32, 32)),
        start=first,
    )
    (kernel,) = plan_amaxes([entry], torch.empty(1)).kernels
    assert kernel.constants["ALIGNED"] is aligned


def test_sources_of_two_dtypes_are_refused():
    entries = [
        TableEntry(
            parameter="fc",
            source=torch.zeros((1, 32, 32), dtype=dtype),
            target=QuantizedWeight.empty(MXFP8, (1, 32, 32)),
        )
        for dtype in (torch.float32, torch.bfloat16)
    ]
    with pytest.raises(LayoutError, match=r"one dtype, got torch.bfloat16, torch.float32"):
        plan_amaxes(entries, torch.empty(2))
