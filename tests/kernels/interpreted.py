"""Runs the kernels on the CPU, for test_interpreted_kernels.py: Triton's interpreter is global."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are decorated

import sys
import traceback

import torch
from triton.runtime import interpreter

from moe_optim import ops, reference
from moe_optim.formats import DIRECTIONS, FORMATS, NVFP4, QuantizedWeight
from moe_optim.kernels import member_table
from moe_optim.kernels.member_table import MemberTable, TableEntry
from moe_optim.kernels.steps import table as step_table
from moe_optim.kernels.steps.table import AdamState, StepTable
from moe_optim.layout.partition import infer_partition
from tests.support.bytes import assert_bytes_equal
from tests.support.inputs import SENTINEL, e4m3_exact_integers, poisoned

GAP = 40

_set_attr = interpreter._LangPatchScope.set_attr


def _with_index_of_one_element(self, obj, name, value):
    """Let scalars be loop bounds: they are arrays [1], of which numpy 2.4 makes no int."""
    if name == "__index__":
        _set_attr(self, obj, name, lambda tensor: int(tensor.handle.data.item()))
    else:
        _set_attr(self, obj, name, value)


interpreter._LangPatchScope.set_attr = _with_index_of_one_element
SHAPES = {
    "mxfp8": ((2, 64, 128), (1, 32, 32), (3, 32, 96), (1, 96, 160)),
    "mxfp8_2d": ((2, 64, 128), (1, 32, 32), (3, 32, 96), (1, 96, 160)),
    "nvfp4": ((2, 64, 256), (1, 16, 16), (3, 32, 80), (1, 48, 272)),
    "fp8_block": ((2, 128, 128), (1, 130, 40), (1, 256, 136), (2, 7, 129)),
}


def exact(format, shape, seed):
    """Return values that the interpreter cannot round wrongly: no cast of them rounds at all."""
    if format is not NVFP4:
        return e4m3_exact_integers(*shape, seed=seed)
    # With an amax of 6 in every block S_dec is exactly 448, and the codes are the values.
    generator = torch.Generator().manual_seed(seed)
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    master = values[torch.randint(8, shape, generator=generator)]
    master *= torch.randint(0, 2, shape, generator=generator) * 2 - 1
    master[:, ::16, ::16] = -6.0
    return master


def padded(format, shape):
    """Return storage whose rows and experts lie apart, and the memory around its planes."""
    q = QuantizedWeight.empty(format, shape)
    memories, views = {}, {}
    for name, plane in q.planes().items():
        if plane.dim() == 1:
            views[name] = plane.fill_(-1)
            continue
        experts, rows, cols = plane.shape
        memory = torch.empty((experts, rows + 4, cols + 24), dtype=plane.dtype)
        memory.view(torch.uint8).fill_(SENTINEL)
        memories[name], views[name] = memory, memory[:, :rows, :cols]
    if format.columnwise_copy == "shared":
        views["columnwise_data"] = views["rowwise_data"]
    return QuantizedWeight(format=format, shape=shape, **views), memories


def storage_scales(format, shape):
    return {
        way: torch.full(
            (shape[0], *format.storage_scale_shape(*shape[1:], way)), 7, dtype=format.scale_dtype
        )
        for way in DIRECTIONS
    }


def check(entries, masters, what):
    for entry, master in zip(entries, masters, strict=True):
        q = reference.quantize(master, entry.target.format)
        for name, plane in entry.target.planes().items():
            where = f"{what} {q.format.name} {entry.target.shape} {name}"
            assert_bytes_equal(plane, q.planes()[name], what=where)
        for way, scale in entry.storage_scales.items():
            expected = torch.full_like(scale, 7)
            reference.expand_scale_into(q, way, expected)
            assert_bytes_equal(scale, expected, what=f"{what} {q.format.name} stored {way}")


def whole(format, dtype, apart, zero):
    """All of several weights: planes, what is derived, sources and gaps, and what lies around."""
    shapes = SHAPES[format.name]
    numels = [experts * rows * cols for experts, rows, cols in shapes]
    memory = torch.full((sum(numels) + GAP * (len(shapes) + 1),), 7.0).to(dtype)
    entries, surroundings, start = [], [], GAP
    for seed, (shape, numel) in enumerate(zip(shapes, numels, strict=True)):
        source = memory[start : start + numel].view(shape).copy_(exact(format, shape, seed))
        target, around = padded(format, shape) if apart else (poisoned(format, shape), {})
        surroundings += [(target.planes()[name], memory) for name, memory in around.items()]
        scales = storage_scales(format, shape)
        entry = TableEntry(
            parameter=f"fc{seed}", source=source, target=target, storage_scales=scales
        )
        entries.append(entry)
        start += numel + GAP
    masters, before = [entry.source.clone() for entry in entries], memory.clone()
    table = MemberTable.build(entries, consumed=memory if zero else None)
    assert not table.remainder and not table.unfinished and table.zeroes_in_launch == zero
    ops.requantize(table)
    ops.finish_gather(table)
    check(entries, masters, f"{dtype} apart={apart} zero={zero}")
    assert_bytes_equal(memory, torch.zeros_like(memory) if zero else before, what="sources")
    for plane, around in surroundings:
        inside = torch.zeros(around.shape, dtype=torch.bool)
        inside[:, : plane.shape[1], : plane.shape[2]] = True
        outside = around[~inside].view(torch.uint8)
        assert (outside == SENTINEL).all(), "a kernel wrote outside of a plane"


def cut(format, dtype, cuts_of):
    """Several ranks that share the weights of one table, cut inside of bands and experts."""
    masters = [exact(format, shape, 9 + i) for i, shape in enumerate(SHAPES[format.name])]
    targets = [poisoned(format, tuple(master.shape)) for master in masters]
    ranks = len(cuts_of(masters[0].numel())) + 1
    tables = []
    for rank in range(ranks):
        entries = []
        for index, (master, target) in enumerate(zip(masters, targets, strict=True)):
            cuts = cuts_of(master.numel())
            start, end = (0, *cuts, master.numel())[rank : rank + 2]
            source = master.flatten()[start:end].to(dtype)
            entries.append(
                TableEntry(
                    parameter=f"fc{index}",
                    source=source.clone(),
                    target=target,
                    start=start,
                    cuts=cuts,
                )
            )
        tables.append(MemberTable.build(entries))
    assert not any(table.remainder for table in tables)
    for table in tables:
        ops.partial_amax(table)
    largest = torch.stack([table.exchange for table in tables]).amax(0)
    for table in tables:
        table.exchange.copy_(largest)
        ops.encode(table)
    ops.finish_gather(tables[0])
    check(tables[0].entries, masters, f"cut {dtype}")


def parts(format):
    """Columns on two ranks, whole blocks of each: experts that go on elsewhere share their amax."""
    shape, width = (2, 128, 256), 128
    partition = infer_partition(format, {"columns": {"tp": 2}}, shape=shape)
    master = exact(format, shape, 30)
    master[:, :, width:] *= 0.5  # the amax of an expert lies in the first part
    whole = reference.quantize(master, format)
    tables = []
    for start in (0, width):
        part = master[:, :, start : start + width].contiguous()
        target = poisoned(format, tuple(part.shape))
        entry = TableEntry(parameter="fc1", source=part, target=target, shares_experts=True)
        tables.append(MemberTable.build([entry]))
        assert not tables[-1].remainder
        ops.partial_amax(tables[-1])
    largest = torch.stack([table.exchange for table in tables]).amax(0)
    for rank, table in enumerate(tables):
        table.exchange.copy_(largest)
        ops.encode(table)
        ops.finish_gather(table)
        for name, plane in table.entries[0].target.planes().items():
            slices = partition.plane(name).slices(partition.bounds({"tp": rank}))
            expected = whole.planes()[name][slices]
            assert_bytes_equal(plane, expected, what=f"part {rank} {format.name} {name}")


def stepped(format, gradients, moments, cuts_of):
    """Masters take a step that rounds nothing, on several ranks; whole blocks are encoded with it,
    all others after their maxima have been exchanged, and dense weights are written."""
    shapes = SHAPES[format.name]
    masters = [exact(format, shape, 20 + i) + 0.0 for i, shape in enumerate(shapes)]  # no -0.0
    targets = [poisoned(format, tuple(master.shape)) for master in masters]
    # both betas are 0, so that the update is the sign of the gradient; the rate is 1
    hyper = torch.tensor([[7.0] * 9, [0.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, -1.0]])
    clips = torch.tensor([3.0, 0.5])
    tables, wanted, dense = [], [], []

    def state_of(new, name, weight=None):
        generator = torch.Generator().manual_seed(new.numel())
        signs = torch.randint(0, 2, new.shape, generator=generator) * 2.0 - 1
        wanted.append((new, signs))
        return AdamState(
            parameter=name,
            master=new + signs,
            gradient=(signs * 2).to(gradients),
            exp_avg=torch.full_like(new, 5, dtype=moments),
            exp_avg_sq=torch.full_like(new, 6, dtype=moments),
            group=1,
            norm=1,
            weight=weight,
        )

    for rank in range(len(cuts_of(masters[0].numel())) + 1):
        states, entries = [], []
        for index, (master, target) in enumerate(zip(masters, targets, strict=True)):
            cuts = cuts_of(master.numel())
            start, end = (0, *cuts, master.numel())[rank : rank + 2]
            states.append(state_of(master.flatten()[start:end].clone(), f"fc{index}"))
            entries.append(
                TableEntry(
                    parameter=f"fc{index}",
                    source=states[-1].master,
                    target=target,
                    start=start,
                    cuts=cuts,
                )
            )
        weight = torch.zeros(1000 + rank, dtype=torch.bfloat16)
        dense.append((weight, torch.arange(-500.0, 500.0 + rank).div(4).floor()))
        states.append(state_of(dense[-1][1].clone(), "dense", weight))
        members = MemberTable.build(entries)
        tables.append(StepTable.build(states, hyper, clips, members=members))
        assert not tables[-1].remainder and not tables[-1].has_moved
    for table in tables:
        ops.step(table)
    exchanges = [table.members.exchange for table in tables]
    largest = torch.stack(exchanges).amax(0)
    for table, exchange in zip(tables, exchanges, strict=True):
        exchange.copy_(largest)
        ops.encode_shared(table.members)
    ops.finish_gather(tables[0].members)
    check(tables[0].members.entries, masters, f"stepped {gradients} {moments}")
    states = [state for table in tables for state in table.states]
    for state, (new, signs) in zip(states, wanted, strict=True):
        assert_bytes_equal(state.master, new, what="master")
        assert_bytes_equal(state.gradient, (signs * 2).to(gradients), what="gradient")
        assert_bytes_equal(state.exp_avg, signs.to(moments), what="first moment")
        assert_bytes_equal(state.exp_avg_sq, torch.ones_like(signs).to(moments), what="second")
    for weight, new in dense:
        assert_bytes_equal(weight, new.bfloat16(), what="dense weight")


def check_format(format):
    for dtype in (torch.float32, torch.bfloat16):
        whole(format, dtype, apart=False, zero=dtype == torch.bfloat16)
    whole(format, torch.bfloat16, apart=True, zero=True)
    cut(format, torch.float32, lambda numel: (numel // 6 * 2, numel // 3 * 2))
    parts(format)
    stepped(format, torch.bfloat16, torch.float32, lambda numel: ())
    stepped(format, torch.float32, torch.bfloat16, lambda numel: (numel // 6 * 2, numel // 3 * 2))


def main(names):
    for module in (member_table, step_table):
        module.has_kernels = lambda device: True
    for name in names:
        try:
            check_format(FORMATS[name])
        except Exception:
            traceback.print_exc()
        else:
            print(f"{name}: every byte is the reference's")


if __name__ == "__main__":
    main(sys.argv[1:] or list(FORMATS))
