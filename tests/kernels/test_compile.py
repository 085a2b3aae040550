"""Every kernel compiles for Hopper and for Blackwell, on a machine that has neither."""

import pytest
import torch

from moe_optim.formats import DIRECTIONS, FORMATS, QuantizedWeight
from moe_optim.kernels.exchange import plan_exchange
from moe_optim.kernels.finish_table import FinishTable
from moe_optim.kernels.launch_table import LaunchTable, own_slots
from moe_optim.kernels.table_entry import TableEntry

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from moe_optim.kernels import launch  # noqa: E402

HOPPER, BLACKWELL = 90, 100
TYPES = {torch.int64: "*i64", torch.int32: "*i32", torch.float32: "*fp32"}
SHAPE = (2, 256, 512)


def kernels_of(format, dtype, *, cut=False, zero=False):
    """Return what a GPU would launch for a weight, from encoding to what follows the gather."""
    memory = torch.zeros(SHAPE, dtype=dtype)
    target = QuantizedWeight.empty(format, SHAPE)
    scales = {
        way: torch.zeros(2, *format.storage_scale_shape(*SHAPE[1:], way), dtype=format.scale_dtype)
        for way in DIRECTIONS
    }
    end = 1000 if cut else memory.numel()
    entry = TableEntry(
        parameter="fc",
        source=memory.view(-1)[:end] if cut else memory,
        target=target,
        cuts=(end,) if cut else (),
        storage_scales=scales,
    )
    shared = plan_exchange(format, SHAPE, entry.cuts, first=0, name="fc")
    planned = [(entry, shared)]
    amax = torch.zeros(shared.size + own_slots(planned))
    table = LaunchTable.build(
        planned, amax, first_free_slot=shared.size, consumed=memory if zero else None
    )
    yield from launch._bind_amax(table)
    yield from launch._bind_encode(table)
    finish = FinishTable.build([entry])
    if finish is not None:
        yield from launch._bind_finish(finish)


def compiled(bound, capability):
    names = iter(bound.kernel.arg_names)
    signature = {
        name: TYPES[value.dtype] if isinstance(value, torch.Tensor) else "i32"
        for value, name in zip(bound.arguments, names, strict=False)
    }
    signature |= dict.fromkeys(bound.constants, "constexpr")
    source = ASTSource(bound.kernel, signature, dict(bound.constants))
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options={"num_warps": bound.num_warps})


@pytest.mark.parametrize(
    ("dtype", "capability"),
    [
        pytest.param(torch.float32, HOPPER, id="fp32, hopper"),
        pytest.param(torch.bfloat16, BLACKWELL, id="bf16, blackwell"),
        pytest.param(torch.float32, BLACKWELL, id="fp32, blackwell", marks=pytest.mark.extended),
        pytest.param(torch.bfloat16, HOPPER, id="bf16, hopper", marks=pytest.mark.extended),
    ],
)
@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_every_kernel_compiles(format, dtype, capability):
    seen = []
    for options in ({}, {"cut": True}, {"zero": True}):
        for bound in kernels_of(format, dtype, **options):
            seen.append(bound.kernel.__name__)
            assert compiled(bound, capability).asm["cubin"]
    assert len(seen) >= 3
