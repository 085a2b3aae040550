"""Kernels compiled for a GPU that need not be there, and launched on the CPU."""

import struct
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from moe_optim.kernels import plan
from moe_optim.kernels.plan import BoundKernel
from tests.support.ptx.grid import Grid
from tests.support.ptx.program import parse

TYPES = {
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.uint8: "*u8",
}


def compile_kernel(bound: BoundKernel, capability: int, *given: Any) -> Any:
    """Return what Triton makes of a kernel for GPUs of a compute capability, such as 100.

    Args:
        bound: the kernel with its arguments.
        capability: ten times the compute capability.
        *given: arguments of one launch.
    """
    arguments = zip(bound.kernel.arg_names, (*bound.arguments, *given), strict=False)
    signature = {name: _type_of(value) for name, value in arguments}
    names = set(bound.kernel.arg_names)
    constants = {name: value for name, value in bound.constants.items() if name in names}
    options = {name: value for name, value in bound.constants.items() if name not in names}
    signature |= dict.fromkeys(constants, "constexpr")
    absent = {name: None for name, type in signature.items() if type == "constexpr"}
    source = ASTSource(bound.kernel, signature, absent | constants)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options=bound.options | options)


def _type_of(value: Any) -> str:
    if value is None:
        return "constexpr"
    if isinstance(value, float):
        return "fp32"
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{TYPES[value.base.dtype][1:]}{list(value.block_shape)}>"
    return TYPES[value.dtype] if isinstance(value, torch.Tensor) else "i32"


def emulate(monkeypatch: pytest.MonkeyPatch, capability: int) -> list[str]:
    """Have every launch compile for a GPU and run on the CPU; return the names, as they come."""
    seen: list[str] = []

    def launch(self: BoundKernel, *given: Any) -> None:
        compiled = compile_kernel(self, capability, *given)
        seen.append(self.kernel.__name__)
        program = parse(compiled.asm["ptx"])
        arguments = [_bits(one) for one in (*self.arguments, *given) if one is not None]
        Grid(program, self.grid[:2], arguments, compiled.metadata.shared).run()

    monkeypatch.setattr(BoundKernel, "__call__", launch)
    plan_kernels(monkeypatch)
    return seen


def plan_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all plans take kernels, whatever the device."""
    for name in ("has_kernels", "runs_triton"):
        monkeypatch.setattr(plan, name, lambda device: True)


def _bits(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    return struct.unpack("I", struct.pack("f", value))[0] if isinstance(value, float) else value
