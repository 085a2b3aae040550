"""Every kernel compiles in every variant for both Blackwells, on a machine that has neither.

That for sm_100, Blackwell of data centres, the other tests of this folder run. Hopper's, which runs
on GPUs, is extended.
"""

import importlib
import pkgutil
from itertools import product

import pytest
import torch
from triton import JITFunction

from moe_optim import kernels
from moe_optim.formats import DIRECTIONS, FORMATS, NVFP4_ROWS, QuantizedWeight
from moe_optim.kernels import products
from moe_optim.kernels.adam_state import AdamState
from moe_optim.kernels.directed_state import DirectedState
from moe_optim.kernels.directed_updates import DirectedUpdates
from moe_optim.kernels.exchange import plan_exchange
from moe_optim.kernels.fake import find_table
from moe_optim.kernels.fields import HYPER_FIELDS
from moe_optim.kernels.finish_table import bind_finish
from moe_optim.kernels.health import HealthEntry, HealthTable
from moe_optim.kernels.launch_table import LaunchTable, find_gaps, own_slots
from moe_optim.kernels.matrices import MatrixRows, MatrixShard, gate_and_up
from moe_optim.kernels.member_table import MemberTable
from moe_optim.kernels.momentum import Momentum
from moe_optim.kernels.newton_schulz import NewtonSchulz, scratch_numel
from moe_optim.kernels.norm import NormInput, NormTable
from moe_optim.kernels.packing import plan_pack, plan_unpack
from moe_optim.kernels.plan import BoundKernel
from moe_optim.kernels.step_table import StepTable
from moe_optim.kernels.table_entry import TableEntry
from moe_optim.kernels.tensorwise import ScaledWeight, TensorwiseTable
from moe_optim.kernels.tuning import NORM
from tests.kernels.conftest import MORE_DTYPES, ONE_OF_EACH_PATH, STEPS_ALONG
from tests.support.ptx.launches import compile_kernel, plan_kernels

pytestmark = pytest.mark.slow

FOR_EVERY_GPU = pytest.mark.parametrize(
    "capability",
    [
        pytest.param(100, id="sm_100"),
        pytest.param(120, id="sm_120", marks=pytest.mark.extended),
        pytest.param(90, id="sm_90", marks=pytest.mark.extended),
    ],
)
LATER = [pytest.mark.extended]
SHAPE = (2, 256, 512)
ROW_ONLY = [format for format in FORMATS.values() if format.is_row_only]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def for_dtypes(argument, dtypes=DTYPES):
    return pytest.mark.parametrize(argument, dtypes.values(), ids=dtypes)


def kernels_of(format, dtype, *, cut=False, zero=False):
    """Return what a GPU would launch for a weight, from encoding to what follows the gather."""
    memory = torch.zeros(SHAPE, dtype=dtype)
    target = QuantizedWeight.empty(format, SHAPE)
    ways = () if format.is_row_only else DIRECTIONS  # Transformer Engine stores none in rows
    scales = {
        way: torch.zeros(2, *format.storage_scale_shape(*SHAPE[1:], way), dtype=format.scale_dtype)
        for way in ways
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
    gaps = find_gaps(memory, [entry.source]) if zero else None
    table = LaunchTable.build(planned, amax, first_free_slot=shared.size, gaps=gaps)
    yield from table.bind_maxima()
    yield from table.bind_encoding()
    yield from bind_finish([entry])


def kernels_of_step(format, moments, gradients, *, decoupled):
    """Return what a GPU would launch for a step: quantized weights with a cut, and dense ones."""
    end = 1000  # inside of a block row
    numel = SHAPE[0] * SHAPE[1] * SHAPE[2]

    def state(count, weight=None):
        master, gradient = torch.zeros(count), torch.zeros(count, dtype=gradients)
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
    table = StepTable.build(states, hyper, torch.ones(1), members=members, decoupled=decoupled)
    return table.update.kernels


STEPS = [
    pytest.param(
        *(DTYPES[moments], DTYPES[gradients], decoupled),
        id=f"{moments} moments, {gradients} gradients, {'de' * decoupled}coupled",
        marks=[] if moments == gradients and decoupled == (moments == "fp32") else LATER,
    )
    for moments, gradients, decoupled in product(DTYPES, DTYPES, (True, False))
]


@FOR_EVERY_GPU
@pytest.mark.parametrize(("moments", "gradients", "decoupled"), STEPS)
@ONE_OF_EACH_PATH
def test_every_step_compiles(format, moments, gradients, decoupled, capability, monkeypatch):
    plan_kernels(monkeypatch)
    seen = list(kernels_of_step(format, moments, gradients, decoupled=decoupled))
    assert len(seen) >= 2
    for bound in seen:
        asm = compile_kernel(bound, capability).asm
        assert asm["cubin"]
        assert "div.approx.ftz.f32" in asm["ptx"]


def kernels_of_direction(format, directions):
    """Return what a GPU would launch for a step along a direction: quantized and dense weights."""
    numel = SHAPE[0] * SHAPE[1] * SHAPE[2]
    weights = (None, torch.zeros(96, dtype=torch.bfloat16), torch.zeros(96))
    states = [
        DirectedState(
            parameter="fc",
            master=torch.zeros(numel if weight is None else 96),
            weight=weight,
        )
        for weight in weights
    ]
    target = QuantizedWeight.empty(format, SHAPE)
    entry = TableEntry(parameter="fc", source=states[0].master, target=target)
    updates = DirectedUpdates.build(
        states, torch.zeros(1, HYPER_FIELDS), torch.ones(1), members=[MemberTable.build([entry])]
    )
    pieces = [
        (index, 0, one.master.numel(), torch.zeros(one.master.numel(), dtype=directions))
        for index, one in enumerate(states)
    ]
    return updates.plan(pieces).kernels


@FOR_EVERY_GPU
@STEPS_ALONG
def test_every_step_along_a_direction_compiles(format, dtype, capability, monkeypatch):
    """Differences round once and products before; nothing flushes what is subnormal."""
    plan_kernels(monkeypatch)
    seen = list(kernels_of_direction(format, dtype))
    assert len(seen) == (4 if format.has_global_amax else 3)
    for bound in seen:
        asm = compile_kernel(bound, capability).asm
        assert asm["cubin"] and "ftz" not in asm["ptx"]
        if bound.constants["RULE"] == "direction":
            assert "fma.rn.f32" in asm["ptx"] and "ld.global.v4.b32" in asm["ptx"]


VARIANTS = [
    pytest.param(
        *(dtype, options),
        id=f"{name}, {', '.join(options) or 'whole'}",
        marks=[] if bool(options.get("zero")) == (name == "bf16") else LATER,
    )
    for (name, dtype), options in product(DTYPES.items(), ({}, {"cut": True}, {"zero": True}))
]


@FOR_EVERY_GPU
@pytest.mark.parametrize(("dtype", "options"), VARIANTS)
@ONE_OF_EACH_PATH
def test_every_kernel_compiles(format, dtype, options, capability):
    seen = [compile_kernel(bound, capability) for bound in kernels_of(format, dtype, **options)]
    assert seen and all(one.asm["cubin"] for one in seen)


def kernels_of_norm(monkeypatch, *, count_zeros):
    """Return what a GPU would launch for a norm: for each dtype of gradients, and for all."""
    plan_kernels(monkeypatch)
    gradients = [NormInput(torch.zeros(9, dtype=dtype)) for dtype in NORM]
    return NormTable.build(gradients, count_zeros=count_zeros).kernels


@FOR_EVERY_GPU
@pytest.mark.parametrize("count_zeros", [True, False], ids=["zeros", "no zeros"])
def test_the_norm_compiles(count_zeros, capability, monkeypatch):
    """For both dtypes; whole tiles are read by accesses of 16 bytes."""
    *of_dtypes, of_groups = kernels_of_norm(monkeypatch, count_zeros=count_zeros)
    assert len(of_dtypes) == 2 and compile_kernel(of_groups, capability).asm["cubin"]
    for bound in of_dtypes:
        asm = compile_kernel(bound, capability).asm
        assert asm["cubin"] and "ld.global.v4.b32" in asm["ptx"]


def calls_of_fake_quantization(dtype, monkeypatch):
    """Return what a GPU would launch to fake-quantize, on integers and E4M3, and its gradient."""
    seen = []
    monkeypatch.setattr(BoundKernel, "__call__", lambda *given: seen.append(given))
    values = torch.zeros(2, 16, 64, dtype=dtype)
    amax, result = torch.ones(2), torch.zeros(values.numel(), dtype=dtype)
    table = find_table([values], [values])
    for codes, e4m3 in (((-128.0, 127.0), False), ((-448.0, 448.0), True)):
        table.launch_values(amax, result, codes, e4m3=e4m3)
    table.launch_gradients(amax, result)
    if dtype == torch.bfloat16:  # in memory of sums
        table.launch_zeros(amax, result.float())
    return seen


@FOR_EVERY_GPU
@for_dtypes("dtype", MORE_DTYPES)
def test_fake_quantization_compiles(dtype, capability, monkeypatch):
    """Accesses of 16 bytes, exact quotients, and no product that is fused with a sum."""
    calls = calls_of_fake_quantization(dtype, monkeypatch)
    integers, e4m3, gradients, *zeros = (
        compile_kernel(*call[:1], capability, *call[1:]).asm for call in calls
    )
    assert all(asm["cubin"] and "ld.global.v4.b32" in asm["ptx"] for asm in zeros)
    for asm in (integers, e4m3, gradients):
        assert asm["cubin"]
        assert "ld.global.v4.b32" in asm["ptx"] and "st.global.v4.b32" in asm["ptx"]
    assert "div.rn.f32" in integers["ptx"] and "fma" not in integers["ptx"]
    assert "cvt.rn.satfinite.e4m3x2" in e4m3["ptx"] and "div.full" not in e4m3["ptx"]


def calls_of_fake_blocks(format, dtype, monkeypatch):
    """Return what a GPU would launch to fake-quantize experts to a row-only format."""
    seen = []
    monkeypatch.setattr(BoundKernel, "__call__", lambda *given: seen.append(given))
    values = torch.zeros(2, 16, 128, dtype=dtype)
    result = torch.zeros(values.numel(), dtype=torch.bfloat16)
    find_table([values]).launch_blocks(format, dtype, result)
    return seen


@FOR_EVERY_GPU
@pytest.mark.parametrize("format", ROW_ONLY, ids=lambda format: format.name)
@for_dtypes("dtype")
def test_fake_quantization_to_blocks_compiles(format, dtype, capability, monkeypatch):
    """Reads of 16 bytes, written by the thread that read them, and quotients as IEEE asks."""
    for call in calls_of_fake_blocks(format, dtype, monkeypatch):
        asm = compile_kernel(*call[:1], capability, *call[1:]).asm
        assert asm["cubin"] and "ld.global.v4.b32" in asm["ptx"]
    assert "div.full" not in asm["ptx"]
    assert format.has_global_amax or ".shared." not in asm["ptx"]


def kernels_of_health(format, monkeypatch):
    """Return what a GPU would launch to measure the experts of a weight."""
    plan_kernels(monkeypatch)
    target = QuantizedWeight.empty(format, SHAPE)
    entry = TableEntry(parameter="fc", source=torch.zeros(SHAPE), target=target)
    one = HealthEntry(entry=entry, rows=torch.arange(SHAPE[0]))
    return HealthTable.build([one], SHAPE[0], device=torch.device("cpu")).kernels


@FOR_EVERY_GPU
@ONE_OF_EACH_PATH
def test_measuring_health_compiles(format, capability, monkeypatch):
    """Whole tiles of masters are read by accesses of 16 bytes."""
    measuring, adding = (
        compile_kernel(bound, capability).asm for bound in kernels_of_health(format, monkeypatch)
    )
    assert adding["cubin"] and measuring["cubin"]
    assert "ld.global.v4.b32" in measuring["ptx"]


def kernels_of_tensorwise(monkeypatch):
    """Return what a GPU would launch for weights with one scale: aligned, and one byte beside."""
    plan_kernels(monkeypatch)
    codes = torch.zeros(97, dtype=torch.uint8)
    weights = [
        ScaledWeight(master=torch.zeros(96), data=data, scale_inv=torch.zeros(1))
        for data in (codes[:96], codes[1:])
    ]
    table = TensorwiseTable.build(weights)
    return [*table.find_amaxes.kernels, *table.kernels]


@FOR_EVERY_GPU
def test_the_cast_to_one_scale_compiles(capability, monkeypatch):
    """Masters are read by accesses of 16 bytes, codes written four at a time; quotients are
    rounded to nearest, and neither they nor products flush what is subnormal."""
    bound = kernels_of_tensorwise(monkeypatch)
    made = [(one, compile_kernel(one, capability).asm) for one in bound]
    assert len(made) == 6 and all(asm["cubin"] for _, asm in made)
    for one, asm in made:
        assert "ftz" not in asm["ptx"]
        if one.constants.get("ALIGNED"):
            assert "ld.global.v4.b32" in asm["ptx"]
    texts = {one.kernel.__name__: asm["ptx"] for one, asm in made}
    assert texts["scale_kernel"].count("div.rn.f32") == 2
    assert "cvt.rn.satfinite.e4m3x2" in texts["cast_kernel"]


def kernels_of_momentum(gradients, packed, monkeypatch, *, nesterov):
    """Return what a GPU would launch around the iteration of Muon: for whole weights, and for gate
    and up in blocks that are shorter than a part."""
    plan_kernels(monkeypatch)
    count, rows, cols = SHAPE
    numel = count * rows * cols
    hyper, clips = torch.zeros(1, HYPER_FIELDS), torch.ones(1)
    seen = []
    for matrices in ((MatrixRows.of(rows),), gate_and_up(rows, 8)):
        shard = MatrixShard(
            parameter="fc",
            gradient=torch.zeros(numel, dtype=gradients),
            momentum=torch.zeros(numel),
            shape=SHAPE,
            rows=matrices,
            group=0,
            norm=0,
        )
        plan = Momentum.build([shard], hyper, clips, nesterov=nesterov)
        pieces = [plan.piece(0)]
        batch = torch.zeros(plan.squares.numel(), matrices[0].rows, cols, dtype=packed)
        pack = plan_pack(pieces, plan.squares, batch, hyper, clips, nesterov=nesterov)
        unpack = plan_unpack(batch, pieces, torch.zeros(numel, dtype=packed))
        seen += [*plan.kernels, *pack.kernels, *unpack.kernels]
    return seen


@FOR_EVERY_GPU
@pytest.mark.parametrize(
    ("gradients", "packed", "nesterov"),
    [
        (torch.float32, torch.bfloat16, True),
        (torch.bfloat16, torch.float16, True),
        (torch.bfloat16, torch.float32, False),
    ],
    ids=str,
)
def test_what_surrounds_the_iteration_of_muon_compiles(
    gradients, packed, nesterov, capability, monkeypatch
):
    """Whole tiles are read by accesses of 16 bytes; nothing is flushed, roots and quotients are
    rounded to nearest, and so are clipped gradients before they are added to anything."""
    bound = kernels_of_momentum(gradients, packed, monkeypatch, nesterov=nesterov)
    assert len(bound) == 8
    for one in bound:
        asm, name = compile_kernel(one, capability).asm, one.kernel.__name__
        assert asm["cubin"] and "ftz" not in asm["ptx"]
        if name == "pack_kernel":
            assert "div.rn.f32" in asm["ptx"] and "sqrt.rn.f64" in asm["ptx"]
        if name == "momentum_kernel" or (name == "pack_kernel" and nesterov):
            assert "mul.rn.f32" in asm["ptx"]
        if name != "add_squares_kernel":
            assert one.constants["ALIGNED"] and "ld.global.v4.b32" in asm["ptx"]


def kernels_of_iteration(dtype, monkeypatch, *, form, rows=256, cols=384):
    """Return what a GPU would launch to orthogonalize matrices."""
    plan_kernels(monkeypatch)
    monkeypatch.setattr(products, "is_hopper", lambda device: True)
    monkeypatch.setattr(products, "count_multiprocessors", lambda device: 132)
    matrices = torch.zeros(2, rows, cols, dtype=dtype)
    scratch = torch.zeros(scratch_numel(2, rows, cols, form=form), dtype=dtype)
    steps = ((3.4445, -4.775, 2.0315),) * 3
    return NewtonSchulz.build(matrices, scratch, coefficients=steps, form=form).kernels


@pytest.mark.parametrize(
    ("dtype", "form"),
    [
        pytest.param(torch.bfloat16, "plain", id="bf16, plain"),
        pytest.param(torch.float16, "plain", id="fp16, plain", marks=LATER),
        pytest.param(torch.float16, "gram", id="fp16, gram"),
    ],
)
@FOR_EVERY_GPU
def test_the_iteration_of_muon_compiles(dtype, form, capability, monkeypatch):
    """Wide and tall matrices: every product runs on tensor cores."""
    bound = kernels_of_iteration(dtype, monkeypatch, form=form)
    tall = kernels_of_iteration(dtype, monkeypatch, form=form, rows=384, cols=256)
    assert len(bound) == len(tall) == (9 if form == "plain" else 10)
    variants = {(one.kernel.__name__, str(one.constants)): one for one in (*bound, *tall)}
    for one in variants.values():
        asm = compile_kernel(one, capability).asm
        assert asm["cubin"] and ("mma" in asm["ptx"])


def kernels_written():
    """Yield the name of every kernel of the package; what else Triton compiles they call."""
    for module in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if isinstance(value, JITFunction) and name.endswith("_kernel"):
                yield name


def test_every_kernel_that_is_written_is_compiled_here(monkeypatch):
    plan_kernels(monkeypatch)
    seen = {call[0].kernel for call in calls_of_fake_quantization(torch.bfloat16, monkeypatch)}
    blocks = calls_of_fake_blocks(NVFP4_ROWS, torch.float32, monkeypatch)
    seen |= {call[0].kernel for call in blocks}
    seen |= {bound.kernel for bound in kernels_of_norm(monkeypatch, count_zeros=True)}
    seen |= {bound.kernel for bound in kernels_of_tensorwise(monkeypatch)}
    around_muon = kernels_of_momentum(torch.float32, torch.bfloat16, monkeypatch, nesterov=True)
    seen |= {bound.kernel for bound in around_muon}
    iteration = kernels_of_iteration(torch.bfloat16, monkeypatch, form="plain")
    seen |= {bound.kernel for bound in iteration}
    for format in FORMATS.values():
        seen |= {bound.kernel for bound in kernels_of_health(format, monkeypatch)}
        steps = kernels_of_step(format, torch.float32, torch.float32, decoupled=True)
        seen |= {bound.kernel for bound in (*steps, *kernels_of(format, torch.float32, cut=True))}
    assert {kernel.__name__ for kernel in seen} == set(kernels_written())
