"""Runs the MXFP8 kernel on the CPU, for test_requantize_mxfp8.py: its interpreter is global."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are decorated

import torch

from moe_optim import reference
from moe_optim.formats import MXFP8, QuantizedWeight
from moe_optim.kernels.launch_table import LaunchTable
from moe_optim.kernels.requantize_mxfp8 import requantize_mxfp8
from tests.support.bytes import assert_bytes_equal
from tests.support.inputs import SENTINEL, e4m3_exact_integers, poisoned

SHAPES = ((2, 64, 128), (1, 32, 32), (3, 32, 96), (1, 96, 160))
GAP = 40


def padded(shape):
    """Return storage whose rows and experts lie apart, and the memory it lies in."""
    memories = {}

    def view(name, size):
        experts, rows, cols = size
        memory = torch.full((experts, rows + 2, cols + 24), SENTINEL, dtype=torch.uint8)
        memories[name] = memory
        return memory[:, :rows, :cols]

    planes = {
        f"{direction}_{kind}": view(f"{direction} {kind}", size)
        for direction in ("rowwise", "columnwise")
        for kind, size in (
            ("data", MXFP8.data_shape(shape, direction)),
            ("scale", MXFP8.scale_shape(shape, direction)),
        )
    }
    return QuantizedWeight(format=MXFP8, shape=shape, **planes), memories


def run(dtype, storage, zero):
    numels = [experts * rows * cols for experts, rows, cols in SHAPES]
    memory = torch.full((sum(numels) + GAP * (len(SHAPES) + 1),), 7.0).to(dtype)
    members, expected, surroundings, start = [], [], [], GAP
    for seed, (shape, numel) in enumerate(zip(SHAPES, numels, strict=True)):
        source = memory[start : start + numel].view(shape)
        source.copy_(e4m3_exact_integers(*shape, seed=seed))
        target, memories = storage(shape)
        members.append((source, target))
        expected.append(reference.quantize(source, MXFP8).planes())
        surroundings += [
            (plane, around)
            for plane, around in zip(target.planes().values(), memories.values(), strict=False)
        ]
        start += numel + GAP
    before = memory.clone()
    requantize_mxfp8(LaunchTable.build(members, consumed=memory if zero else None))
    for (_, target), planes in zip(members, expected, strict=True):
        for name, plane in target.planes().items():
            assert_bytes_equal(plane, planes[name], what=f"{target.shape} {name}")
    assert_bytes_equal(memory, torch.zeros_like(memory) if zero else before, what="sources")
    for plane, around in surroundings:
        plane.fill_(SENTINEL)
        assert (around == SENTINEL).all(), "the kernel wrote outside of a plane"


if __name__ == "__main__":
    for dtype in (torch.float32, torch.bfloat16):
        run(dtype, lambda shape: (poisoned(MXFP8, shape), {}), zero=False)
        run(dtype, padded, zero=True)
    print("every byte is the reference's")
