"""Every kernel compiles in every variant for GPUs that this machine has not.

For sm_100, Blackwell of data centres, the other tests of this folder compile and run nearly all;
here one case of each kind runs every time. sm_120 and Hopper, which runs on GPUs, are extended.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from triton import JITFunction

from moe_optim import kernels, ops
from moe_optim.formats import DIRECTIONS, FORMATS, QuantizedWeight
from moe_optim.kernels import products
from moe_optim.kernels.adam_state import AdamState, MasterState
from moe_optim.kernels.fake import find_table
from moe_optim.kernels.fields import HYPER_FIELDS
from moe_optim.kernels.health import HealthEntry, HealthTable
from moe_optim.kernels.matrices import MatrixShard
from moe_optim.kernels.member_table import MemberTable
from moe_optim.kernels.momentum import Momentum
from moe_optim.kernels.newton_schulz import NewtonSchulz, scratch_numel
from moe_optim.kernels.norm import NormInput, NormTable
from moe_optim.kernels.plan import BoundKernel
from moe_optim.kernels.step_table import StepTable
from moe_optim.kernels.table_entry import TableEntry
from moe_optim.kernels.tensorwise import ScaledWeight, TensorwiseTable
from moe_optim.kernels.tuning import NORM
from moe_optim.kernels.update import Updates
from tests.kernels.conftest import GPUS, MORE_DTYPES
from tests.support.matrix_rows import gate_and_up, whole_rows
from tests.support.ptx.launches import compile_kernel, plan_kernels

SHAPE = (2, 256, 512)
NUMEL = SHAPE[0] * SHAPE[1] * SHAPE[2]
END = 1000  # of a shard, inside of a block row
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ROW_ONLY = {name: format for name, format in FORMATS.items() if format.is_row_only}


def requantization(format, dtype, kind):
    """From encoding to what follows the gather."""
    memory = torch.zeros(SHAPE, dtype=dtype)
    ways = () if format.is_row_only else DIRECTIONS  # Transformer Engine stores none in rows
    scales = {
        way: torch.zeros(2, *format.storage_scale_shape(*SHAPE[1:], way), dtype=format.scale_dtype)
        for way in ways
    }
    entry = TableEntry(
        parameter="fc",
        source=memory.view(-1)[:END] if kind == "cut" else memory,
        target=QuantizedWeight.empty(format, SHAPE),
        cuts=(END,) if kind == "cut" else (),
        storage_scales=scales,
    )
    table = MemberTable.build([entry], consumed=memory if kind == "zeroed" else None)
    return [*table.find_maxima.kernels, *table.encode.kernels, *table.finish.kernels]


def step(format, moments, gradients, decoupled):
    """Quantized weights with a cut, and dense ones."""

    def state(count, weight=None):
        exp_avg, exp_avg_sq = (torch.zeros(count, dtype=moments) for _ in range(2))
        return AdamState(
            parameter="fc",
            master=torch.zeros(count),
            gradient=torch.zeros(count, dtype=gradients),
            exp_avg=exp_avg,
            exp_avg_sq=exp_avg_sq,
            weight=weight,
        )

    dense = state(96, torch.zeros(96, dtype=torch.bfloat16))
    states = [state(END), state(NUMEL - END), dense]
    target = QuantizedWeight.empty(format, SHAPE)
    entries = [
        TableEntry(parameter="fc", source=one.master, target=target, start=start, cuts=(END,))
        for one, start in zip(states, (0, END), strict=False)
    ]
    members, hyper = MemberTable.build(entries), torch.zeros(1, HYPER_FIELDS)
    table = StepTable.build(states, hyper, torch.ones(1), members=members, decoupled=decoupled)
    return table.update.kernels


def step_along(format, directions):
    """Quantized and dense weights."""
    weights = (None, torch.zeros(96, dtype=torch.bfloat16), torch.zeros(96))
    states = [
        MasterState(
            parameter="fc", master=torch.zeros(NUMEL if weight is None else 96), weight=weight
        )
        for weight in weights
    ]
    target = QuantizedWeight.empty(format, SHAPE)
    entry = TableEntry(parameter="fc", source=states[0].master, target=target)
    updates = Updates.build(
        states,
        *(torch.zeros(1, HYPER_FIELDS), torch.ones(1)),
        rule="direction",
        members=[MemberTable.build([entry])],
    )
    pieces = [
        (index, 0, one.master.numel(), torch.zeros(one.master.numel(), dtype=directions))
        for index, one in enumerate(states)
    ]
    return updates.plan_along(pieces).kernels


def norm(count_zeros):
    gradients = [NormInput(torch.zeros(9, dtype=dtype)) for dtype in NORM]
    return NormTable.build(gradients, count_zeros=count_zeros).kernels


def calls_of(launch):
    """Return the calls of kernels that are bound without the arguments of a launch."""
    seen: list[tuple[Any, ...]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BoundKernel, "__call__", lambda *given: seen.append(given))
        launch()
    return seen


def fake_quantization(dtype):
    """On integers and E4M3, and its gradient."""
    values = torch.zeros(2, 16, 64, dtype=dtype)
    amax, result = torch.ones(2), torch.zeros(values.numel(), dtype=dtype)
    table = find_table([values], [values])

    def launch():
        for codes, e4m3 in (((-128.0, 127.0), False), ((-448.0, 448.0), True)):
            table.launch_values(amax, result, codes, e4m3=e4m3)
        table.launch_gradients(amax, result)
        if dtype == torch.bfloat16:  # in memory of sums
            table.launch_zeros(amax, result.float())

    return calls_of(launch)


def fake_blocks(format, dtype):
    values = torch.zeros(2, 16, 128, dtype=dtype)
    result = torch.zeros(values.numel(), dtype=torch.bfloat16)
    return calls_of(lambda: find_table([values]).launch_blocks(format, dtype, result))


def dequantization(format, direction):
    quantized = QuantizedWeight.empty(format, SHAPE)
    return calls_of(lambda: ops.dequantize(quantized, direction))


def health(format):
    target = QuantizedWeight.empty(format, SHAPE)
    entry = TableEntry(parameter="fc", source=torch.zeros(SHAPE), target=target)
    one = HealthEntry(entry=entry, rows=torch.arange(SHAPE[0]))
    return HealthTable.build([one], SHAPE[0], device=torch.device("cpu")).kernels


def cast_to_one_scale():
    """Aligned, and one byte beside."""
    codes = torch.zeros(97, dtype=torch.uint8)
    weights = [
        ScaledWeight(master=torch.zeros(96), data=data, scale_inv=torch.zeros(1))
        for data in (codes[:96], codes[1:])
    ]
    table = TensorwiseTable.build(weights)
    return [*table.find_amaxes.kernels, *table.kernels]


def around_muon(gradients, packed, nesterov):
    """Whole weights, and gate and up in blocks that are shorter than a part."""
    count, rows, cols = SHAPE
    hyper, clips = torch.zeros(1, HYPER_FIELDS), torch.ones(1)
    for matrices in (whole_rows(rows), gate_and_up(rows, 8)):
        shard = MatrixShard(
            parameter="fc",
            gradient=torch.zeros(NUMEL, dtype=gradients),
            momentum=torch.zeros(NUMEL),
            shape=SHAPE,
            rows=matrices,
            group=0,
            norm=0,
        )
        plan = Momentum.build([shard], hyper, clips, nesterov=nesterov)
        pieces = [plan.piece(0)]
        batch = torch.zeros(plan.squares.numel(), matrices[0].rows, cols, dtype=packed)
        pack = plan.plan_pack(pieces, batch)
        unpack = plan.plan_unpack(batch, pieces, torch.zeros(NUMEL, dtype=packed))
        yield from (*plan.kernels, *pack.kernels, *unpack.kernels)


def iteration_of_muon(dtype, form):
    """Wide and tall matrices."""
    variants = {}
    for rows, cols in ((256, 384), (384, 256)):
        matrices = torch.zeros(2, rows, cols, dtype=dtype)
        scratch = torch.zeros(scratch_numel(2, rows, cols, form=form), dtype=dtype)
        steps = ((3.4445, -4.775, 2.0315),) * 3
        plan = NewtonSchulz.build(matrices, scratch, coefficients=steps, form=form)
        assert len(plan.kernels) == (9 if form == "plain" else 10)
        variants |= {(one.kernel.__name__, str(one.constants)): one for one in plan.kernels}
    return variants.values()


def cases() -> Iterator[tuple[str, Callable[[], Any], str]]:
    """Yield names of cases, what a GPU would launch, and what no launch of a case contains."""
    for (name, format), (of, dtype) in product(FORMATS.items(), DTYPES.items()):
        for kind in ("whole", "cut", "zeroed"):
            yield f"{name} from {of}, {kind}", partial(requantization, format, dtype, kind), ""
        for (gradients, grad_dtype), rule in product(DTYPES.items(), ("adam", "adamw")):
            given = (format, dtype, grad_dtype, rule == "adamw")
            yield f"{rule} of {name}, {of} moments, {gradients}", partial(step, *given), ""
    for (name, format), (of, dtype) in product(FORMATS.items(), MORE_DTYPES.items()):
        yield f"{name} along {of}", partial(step_along, format, dtype), "ftz"
    for name, format in FORMATS.items():
        yield f"health of {name}", partial(health, format), ""
        for direction in format.directions:
            yield f"{direction} {name}", partial(dequantization, format, direction), ""
    for (name, format), (of, dtype) in product(ROW_ONLY.items(), DTYPES.items()):
        yield f"fake {name} from {of}", partial(fake_blocks, format, dtype), "div.full"
    for of, dtype in MORE_DTYPES.items():
        yield f"fake {of}", partial(fake_quantization, dtype), ""
    for counts in (True, False):
        yield f"norm, {'' if counts else 'no '}zeros", partial(norm, counts), ""
    yield "one scale", cast_to_one_scale, "ftz"
    fp32, bf16, fp16 = MORE_DTYPES.values()
    for given in ((fp32, bf16, True), (bf16, fp16, True), (bf16, fp32, False)):
        yield f"around muon, {given}", partial(around_muon, *given), "ftz"
    for given in ((bf16, "plain"), (fp16, "plain"), (fp16, "gram")):
        yield f"iteration of muon, {given}", partial(iteration_of_muon, *given), ""


EVERY_TIME = {
    "adamw of mxfp8, fp32 moments, fp32",
    "mxfp8 along bf16",
    "health of mxfp8",
    "fake int4 from bf16",
    "fake bf16",
    "norm, zeros",
    "one scale",
    "around muon, (torch.float32, torch.bfloat16, True)",
    "iteration of muon, (torch.bfloat16, 'plain')",
}
LOAD, STORE = "ld.global.v4.b32", "st.global.v4.b32"
PROMISES = [  # kernel, constants -> what its code contains, and what it does not
    ("", {"RULE": "adam"}, ["div.approx.ftz.f32"], []),
    ("", {"RULE": "adamw"}, ["div.approx.ftz.f32"], []),
    ("", {"RULE": "direction"}, ["fma.rn.f32", LOAD], []),  # differences round once
    ("sum_squares_kernel", {}, [LOAD], []),
    ("measure_kernel", {"WHOLE": True}, [LOAD], []),
    ("zero_clipped_kernel", {}, [LOAD], []),
    ("clip_gradient_kernel", {}, [LOAD, STORE], []),
    ("fake_quantize_kernel", {"E4M3": False}, [LOAD, STORE, "div.rn.f32"], ["fma"]),
    ("fake_quantize_kernel", {"E4M3": True}, [LOAD, STORE, "rn.satfinite.e4m3x2"], ["div.full"]),
    ("span_amax_kernel", {}, [LOAD], []),
    ("fake_blocks_kernel", {}, [LOAD], []),
    ("fake_blocks_kernel", {"SCALE": "bf16"}, [], [".shared."]),  # written by who has read
    ("part_amax_kernel", {"ALIGNED": True}, [LOAD], []),
    ("cast_kernel", {"ALIGNED": True}, [LOAD, "cvt.rn.satfinite.e4m3x2"], []),
    ("scale_kernel", {}, ["div.rn.f32"], []),
    ("momentum_kernel", {"ALIGNED": True}, [LOAD, "mul.rn.f32"], []),
    ("pack_kernel", {"ALIGNED": True}, [LOAD, "div.rn.f32", "sqrt.rn.f64"], []),
    ("pack_kernel", {"NESTEROV": True}, ["mul.rn.f32"], []),
    ("unpack_kernel", {"ALIGNED": True}, [LOAD], []),
    ("product_kernel", {}, ["mma"], []),
    ("polynomial_kernel", {}, ["mma"], []),
]


@pytest.mark.slow
@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize(
    ("make", "absent"),
    [
        pytest.param(make, absent, id=name, marks=[pytest.mark.extended] * (name not in EVERY_TIME))
        for name, make, absent in cases()
    ],
)
def test_every_kernel_compiles(make, absent, capability, as_on_a_gpu):
    """With accesses of 16 bytes; quotients, products and subnormals as the reference has them."""
    launches = [one if isinstance(one, tuple) else (one,) for one in make()]
    assert launches
    for bound, *given in launches:
        asm, name = compile_kernel(bound, capability, *given).asm, bound.kernel.__name__
        assert asm["cubin"] and (not absent or absent not in asm["ptx"]), name
        for kernel, constants, contained, avoided in PROMISES:
            if name.startswith(kernel) and constants.items() <= bound.constants.items():
                assert all(text in asm["ptx"] for text in contained), (name, contained)
                assert not any(text in asm["ptx"] for text in avoided), (name, avoided)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    plan_kernels(monkeypatch)
    monkeypatch.setattr(products, "is_hopper", lambda device: True)
    monkeypatch.setattr(products, "count_multiprocessors", lambda device: 132)


def kernels_written():
    """Yield the name of every kernel of the package; what else Triton compiles they call."""
    for module in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if isinstance(value, JITFunction) and name.endswith("_kernel"):
                yield name


def test_every_kernel_that_is_written_is_compiled_here(as_on_a_gpu):
    assert {name for name, *_ in cases()} >= EVERY_TIME
    launches = (one for _, make, _ in cases() for one in make())
    seen = {(one[0] if isinstance(one, tuple) else one).kernel.__name__ for one in launches}
    assert seen == set(kernels_written())
