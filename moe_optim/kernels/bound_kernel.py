"""A Triton kernel with everything a launch of it needs, so that the next launch only launches."""

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch


class BoundKernel:
    """A kernel, its grid and its arguments, which are the same at every launch.

    The first call compiles. Later ones go straight to the compiled kernel: Triton need not look at
    each argument again to find it, which takes most of the host's time for a launch.
    """

    def __init__(self, kernel: Any, grid: int, *arguments: Any, num_warps: int, **constants: Any):
        """Bind a kernel.

        Args:
            kernel: decorated with ``triton.jit``.
            grid: number of programs, at least 1.
            *arguments: tensors and integers, the first parameters of the kernel in their order.
            num_warps: warps of a program.
            **constants: all other parameters of the kernel, by name.
        """
        self.kernel, self.grid, self.num_warps = kernel, (grid, 1, 1), num_warps
        self.arguments, self.constants = arguments, constants
        names = kernel.arg_names[len(arguments) :]
        self._in_order = (*arguments, *(constants[name] for name in names))
        self._launch: Any = None

    def __call__(self) -> None:
        """Launch on the current stream of the current device, which is that of the arguments."""
        if self._launch is not None:
            self._launch(*self._in_order)
            return
        options = {**self.constants, "num_warps": self.num_warps}
        compiled = self.kernel[self.grid](*self.arguments, **options)
        if compiled is not None:  # Triton's interpreter compiles nothing
            self._launch = compiled[self.grid]


def launch_all(kernels: Iterable[BoundKernel], device: torch.device) -> None:
    """Launch kernels one after the other on the current stream of ``device``."""
    here = device.type != "cuda" or torch.cuda.current_device() == device.index
    with nullcontext() if here else torch.cuda.device(device):
        for kernel in kernels:
            kernel()
