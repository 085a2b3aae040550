"""A Triton kernel with everything a launch of it needs, so that the next launch only launches."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class BoundKernel:
    """A kernel, its grid and its arguments, the same at every launch but for those given to it.

    The first call compiles. Later ones go straight to the compiled kernel: Triton need not look at
    each argument again to find it, which takes most of the host's time for a launch.
    """

    def __init__(
        self,
        kernel: Any,
        grid: int | tuple[int, int],
        *arguments: Any,
        num_warps: int,
        registers: int | None = None,
        **constants: Any,
    ) -> None:
        """Bind a kernel.

        Args:
            kernel: decorated with ``triton.jit``.
            grid: number of programs, at least 1; along two axes where there are two.
            *arguments: tensors and integers, the first parameters of the kernel in their order.
            num_warps: warps of a program.
            registers: how many a thread may take; by default what the compiler likes.
            **constants: the last parameters of the kernel, by name; those between are given to
                every launch.
        """
        across, down = grid if isinstance(grid, tuple) else (grid, 1)
        self.kernel, self.grid = kernel, (across, down, 1)
        # Triton's default for contracting products and sums differs between its versions
        self.options = {"num_warps": num_warps, "enable_fp_fusion": True}
        if registers is not None:
            self.options["maxnreg"] = registers
        self.arguments, self.constants = arguments, constants
        self._last = tuple(constants[name] for name in kernel.arg_names if name in constants)
        self._launch: Any = None

    def __call__(self, *given: Any) -> None:
        """Launch on the current stream of the current device, which is that of the arguments.

        Args:
            *given: of this launch alone, of the types and the alignment of those of the first one.
        """
        if self._launch is not None:
            self._launch(*self.arguments, *given, *self._last)
            return
        compiled = self.kernel[self.grid](*self.arguments, *given, **self.constants, **self.options)
        self._launch = compiled[self.grid]


def launch_all(kernels: Iterable[BoundKernel], device: torch.device) -> None:
    """Launch kernels one after the other on the current stream of ``device``."""
    with current_device(device):
        for kernel in kernels:
            kernel()


def current_device(device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which ``device`` is the one that kernels are launched on."""
    here = device.type != "cuda" or torch.cuda.current_device() == device.index
    return nullcontext() if here else torch.cuda.device(device)


def is_capturing(device: torch.device) -> bool:
    """Return whether what is launched now on a device goes into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
