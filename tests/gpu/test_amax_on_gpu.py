"""One launch finds the amax of every expert on a GPU, rounding included, in any format."""

import pytest
import torch

from moe_optim.formats import MXFP8, QuantizedWeight
from moe_optim.kernels.amax import plan_amaxes
from moe_optim.kernels.table_entry import TableEntry
from tests.support.bytes import assert_bytes_equal
from tests.support.inputs import wide_range_weights, with_specials
from tests.support.modules.amax import amax_of

pytestmark = pytest.mark.gpu

SHAPES = ((3, 256, 1408), (1, 32, 32), (5, 64, 96), (2, 1024, 4128))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("rank", range(3))
def test_amaxes_are_plain_torchs(dtype: torch.dtype, rank: int):
    """Thirds of weights, which end anywhere in an expert; special values; and new values later."""
    entries, whole, ranges = [], [], []
    for shape in SHAPES:
        numel = shape[0] * shape[1] * shape[2]
        start, end = numel * rank // 3, numel * (rank + 1) // 3
        whole.append(torch.zeros(shape, dtype=dtype))
        ranges.append(slice(start, end))
        entries.append(
            TableEntry(
                parameter="fc",
                source=torch.empty(end - start, dtype=dtype, device="cuda"),
                target=QuantizedWeight.empty(MXFP8, shape, device="cuda"),
                start=start,
            )
        )
    found = torch.full((sum(shape[0] for shape in SHAPES),), -1.0, device="cuda")
    table = plan_amaxes(entries, found)
    for seed in (0, 100):
        for index, (entry, owned, part) in enumerate(zip(entries, whole, ranges, strict=True)):
            master = with_specials(
                wide_range_weights(*owned.shape, seed=seed + index), every=100_003
            )
            owned.view(-1)[part] = master.view(-1)[part].to(dtype)
            entry.source.copy_(owned.view(-1)[part])
        table.launch()
        assert_bytes_equal(found.cpu(), torch.cat([amax_of(owned) for owned in whole]))
