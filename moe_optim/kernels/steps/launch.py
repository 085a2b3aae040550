"""The launches of an update: ranges by their dtypes, and whole blocks by format.

None of them allocates or waits for the device, so a CUDA graph can capture them once they have run
outside of one.
"""

from collections.abc import Iterator

import torch

from moe_optim.kernels.bound_kernel import BoundKernel, launch_all
from moe_optim.kernels.launch import encoding_kernel
from moe_optim.kernels.steps.kernel import adam_kernel
from moe_optim.kernels.steps.table import StepTable
from moe_optim.kernels.tuning import ADAM_TILE

_WEIGHTS = {None: "none", torch.bfloat16: "bf16", torch.float32: "fp32"}


def launch_step(table: StepTable) -> None:
    """Step what launches handle, find the amax of experts, and encode whole blocks without one."""
    if not table.kernels:
        table.kernels.extend(_bind(table))
    launch_all(table.kernels, table.hyper.device)


def _bind(table: StepTable) -> Iterator[BoundKernel]:
    of_members = () if table.members is None else table.members.launches
    amaxes = of_members[0].amax if of_members else table.hyper  # which nobody writes to then
    for one in table.ranges:
        yield BoundKernel(
            adam_kernel,
            len(one.parts),
            one.states,
            one.masters,
            one.parts,
            table.hyper,
            table.clips,
            amaxes,
            TILE=ADAM_TILE.cols,
            GRADIENT_FP32=one.gradient_dtype == torch.float32,
            MOMENTS_FP32=one.moment_dtype == torch.float32,
            DECOUPLED=table.decoupled,
            ALIGNED=one.aligned,
            WEIGHTS=_WEIGHTS[one.weight_dtype],
            AMAX=one.finds_amax,
            num_warps=ADAM_TILE.num_warps,
        )
    for blocks in table.encoding:
        yield encoding_kernel(
            blocks.table,
            blocks.table.tiles,
            blocks.table.num_tiles,
            blocks.aligned,
            blocks.states,
            table.hyper,
            table.clips,
            CUT=False,
            GRADIENT_FP32=blocks.gradient_dtype == torch.float32,
            MOMENTS_FP32=blocks.moment_dtype == torch.float32,
            DECOUPLED=table.decoupled,
        )
