"""Every kernel compiles for Hopper and for Blackwell, on a machine that has neither.

For sm_100, Blackwell of data centres, the other tests of this folder compile, and run the result.
What is extended compiles the same code for the other of these two, or from another dtype.
"""

import pytest
import torch

from moe_optim.formats import DIRECTIONS, FORMATS, QuantizedWeight
from moe_optim.kernels import launch, member_table
from moe_optim.kernels.exchange import plan_exchange
from moe_optim.kernels.fake import launch as fake_launch
from moe_optim.kernels.fake.table import find_table
from moe_optim.kernels.finish_table import FinishTable
from moe_optim.kernels.health import HealthEntry, HealthTable
from moe_optim.kernels.health import launch as health_launch
from moe_optim.kernels.health import table as health_table
from moe_optim.kernels.launch_table import HYPER_FIELDS, LaunchTable, own_slots
from moe_optim.kernels.member_table import MemberTable
from moe_optim.kernels.norm import Gradients, NormTable
from moe_optim.kernels.norm import launch as norm_launch
from moe_optim.kernels.norm import table as norm_table
from moe_optim.kernels.steps import launch as step_launch
from moe_optim.kernels.steps import table as step_table
from moe_optim.kernels.steps.table import AdamState, StepTable
from moe_optim.kernels.table_entry import TableEntry
from tests.support.ptx.launches import compile_kernel

pytestmark = pytest.mark.slow

HOPPER, BLACKWELL_RTX = 90, 120
extended = pytest.mark.extended
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


def kernels_of_step(format, moments):
    """Return what a GPU would launch for a step: quantized weights with a cut, and dense ones."""
    end = 1000  # inside of a band
    numel = SHAPE[0] * SHAPE[1] * SHAPE[2]

    def state(count, weight=None):
        master, gradient = torch.zeros(count), torch.zeros(count, dtype=torch.bfloat16)
        moment = [torch.zeros(count, dtype=moments) for _ in range(2)]
        return AdamState(
            parameter="fc",
            master=master,
            gradient=gradient,
            exp_avg=moment[0],
            exp_avg_sq=moment[1],
            weight=weight,
        )

    first, second, dense = (
        state(end),
        state(numel - end),
        state(96, torch.zeros(96, dtype=torch.bfloat16)),
    )
    target = QuantizedWeight.empty(format, SHAPE)
    entries = [
        TableEntry(parameter="fc", source=one.master, target=target, start=start, cuts=(end,))
        for one, start in ((first, 0), (second, end))
    ]
    members = MemberTable.build(entries)
    hyper = torch.zeros(1, HYPER_FIELDS)
    states = [first, second, dense]
    yield from step_launch._bind(
        StepTable.build(states, hyper, torch.ones(1), members=members, decoupled=False)
    )


@pytest.mark.parametrize(
    ("moments", "capability"),
    [
        pytest.param(torch.float32, HOPPER, id="fp32, hopper"),
        pytest.param(torch.bfloat16, BLACKWELL_RTX, id="bf16, sm_120", marks=extended),
    ],
)
@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_every_step_compiles(format, moments, capability, monkeypatch):
    for module in (member_table, step_table):
        monkeypatch.setattr(module, "has_kernels", lambda device: True)
    seen = list(kernels_of_step(format, moments))
    assert len(seen) >= 2
    for bound in seen:
        asm = compile_kernel(bound, capability).asm
        assert asm["cubin"]
        assert "div.approx.ftz.f32" in asm["ptx"]


@pytest.mark.parametrize(
    ("dtype", "capability"),
    [
        pytest.param(torch.float32, HOPPER, id="fp32, hopper"),
        pytest.param(torch.bfloat16, BLACKWELL_RTX, id="bf16, sm_120"),
        pytest.param(torch.float32, BLACKWELL_RTX, id="fp32, sm_120", marks=extended),
        pytest.param(torch.bfloat16, HOPPER, id="bf16, hopper", marks=extended),
    ],
)
@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_every_kernel_compiles(format, dtype, capability):
    seen = []
    for options in ({}, {"cut": True}, {"zero": True}):
        for bound in kernels_of(format, dtype, **options):
            seen.append(bound.kernel.__name__)
            assert compile_kernel(bound, capability).asm["cubin"]
    assert len(seen) >= 3


@pytest.mark.parametrize(
    ("count_zeros", "capability"),
    [
        pytest.param(True, HOPPER, id="zeros, hopper"),
        pytest.param(False, BLACKWELL_RTX, id="sm_120"),
        pytest.param(False, HOPPER, id="hopper", marks=extended),
        pytest.param(True, BLACKWELL_RTX, id="zeros, sm_120", marks=extended),
    ],
)
def test_the_norm_compiles(count_zeros, capability, monkeypatch):
    """For both dtypes; whole tiles are read by accesses of 16 bytes."""
    monkeypatch.setattr(norm_table, "runs_triton", lambda device: True)
    gradients = [Gradients(torch.zeros(9, dtype=dtype)) for dtype in norm_table.NORM]
    *of_dtypes, of_groups = norm_launch._bind(NormTable.build(gradients, count_zeros=count_zeros))
    assert len(of_dtypes) == 2 and compile_kernel(of_groups, capability).asm["cubin"]
    for bound in of_dtypes:
        assert "ld.global.v4.b32" in compile_kernel(bound, capability).asm["ptx"]


@pytest.mark.parametrize(
    ("dtype", "capability"),
    [
        pytest.param(torch.float32, HOPPER, id="fp32, hopper"),
        pytest.param(torch.bfloat16, BLACKWELL_RTX, id="bf16, sm_120"),
        pytest.param(torch.float16, HOPPER, id="fp16, hopper", marks=extended),
        pytest.param(torch.float32, BLACKWELL_RTX, id="fp32, sm_120", marks=extended),
        pytest.param(torch.bfloat16, HOPPER, id="bf16, hopper", marks=extended),
        pytest.param(torch.float16, BLACKWELL_RTX, id="fp16, sm_120", marks=extended),
    ],
)
def test_fake_quantization_compiles(dtype, capability, monkeypatch):
    """Accesses of 16 bytes, exact quotients, and no product that is fused with a sum."""
    seen = []
    monkeypatch.setattr(fake_launch.BoundKernel, "__call__", lambda *given: seen.append(given))
    values = torch.zeros(2, 16, 64, dtype=dtype)
    amax, result = torch.ones(2), torch.zeros(values.numel(), dtype=dtype)
    table = find_table([values], [values])
    for codes, e4m3 in (((-128.0, 127.0), False), ((-448.0, 448.0), True)):
        fake_launch.launch_fake_quantize(table, amax, result, codes, e4m3=e4m3)
    fake_launch.launch_clip_gradient(table, amax, result)
    integers, e4m3, gradients = (
        compile_kernel(*call[:1], capability, *call[1:]).asm for call in seen
    )
    for asm in (integers, e4m3, gradients):
        assert asm["cubin"]
        assert "ld.global.v4.b32" in asm["ptx"] and "st.global.v4.b32" in asm["ptx"]
    assert "div.rn.f32" in integers["ptx"] and "fma" not in integers["ptx"]
    assert "cvt.rn.satfinite.e4m3x2" in e4m3["ptx"] and "div.full" not in e4m3["ptx"]


@pytest.mark.parametrize(
    "capability",
    [
        pytest.param(BLACKWELL_RTX, id="sm_120"),
        pytest.param(HOPPER, id="hopper", marks=extended),
    ],
)
@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_measuring_health_compiles(format, capability, monkeypatch):
    """Whole tiles of masters are read by accesses of 16 bytes."""
    monkeypatch.setattr(health_table, "has_kernels", lambda device: True)
    target = QuantizedWeight.empty(format, SHAPE)
    entry = TableEntry(parameter="fc", source=torch.zeros(SHAPE), target=target)
    one = HealthEntry(entry=entry, rows=torch.arange(SHAPE[0]))
    table = HealthTable.build([one], SHAPE[0], device=torch.device("cpu"))
    measuring, adding = health_launch._bind(table, table.launches[0])
    assert compile_kernel(adding, capability).asm["cubin"]
    assert "ld.global.v4.b32" in compile_kernel(measuring, capability).asm["ptx"]
