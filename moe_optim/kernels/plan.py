"""Plans: kernels with their arguments, bound once and launched at every step."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from moe_optim.errors import ConfigError, LayoutError
from moe_optim.places import Places

Backend = Literal["auto", "reference"]
"""Backend: ``auto`` for kernels where supported, ``reference`` for plain torch."""

Call = Callable[[], object]
"""Kernel launch, or function of plain torch."""

ALIGNMENT = 16
"""Bytes of the widest memory access."""


class BoundKernel:
    """Kernel with a fixed grid and fixed leading arguments.

    The first call compiles. Later calls invoke the compiled kernel directly, without Triton's
    per-launch argument inspection, which dominates the host time of a launch.
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
            kernel: function decorated with ``triton.jit``.
            grid: number of programs, at least 1, along one or two axes.
            *arguments: tensors and integers, the first parameters of the kernel in order.
            num_warps: warps per program.
            registers: maximum registers per thread; by default the compiler's choice.
            **constants: last parameters of the kernel, by name. Each launch passes those in
                between.
        """
        across, down = grid if isinstance(grid, tuple) else (grid, 1)
        self.kernel, self.grid = kernel, (across, down, 1)
        # Triton versions differ in their default for FMA contraction
        self.options = {"num_warps": num_warps, "enable_fp_fusion": True}
        if registers is not None:
            self.options["maxnreg"] = registers
        self.arguments, self.constants = arguments, constants
        self._last = tuple(constants[name] for name in kernel.arg_names if name in constants)
        self._launch: Any = None

    @property
    def is_compiled(self) -> bool:
        """Whether a launch only launches."""
        return self._launch is not None

    def __call__(self, *given: Any) -> None:
        """Launch on the current stream of the current device, which must hold the arguments.

        ``given`` must have the same types and alignment at every launch.
        """
        if self._launch is not None:
            self._launch(*self.arguments, *given, *self._last)
            return
        compiled = self.kernel[self.grid](*self.arguments, *given, **self.constants, **self.options)
        self._launch = compiled[self.grid]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Plan:
    """Calls in a fixed order, and the tensors whose addresses they use.

    Building a plan chooses between kernels and plain torch. If all calls are kernels, a launch
    neither allocates nor synchronizes, so a CUDA graph can capture it after one launch outside the
    graph.
    """

    device: torch.device
    """Device of all tensors."""
    calls: tuple[Call, ...]
    """Calls in order."""
    places: Places = Places(())
    """Tensors whose addresses kernels use, and whose memory may be freed or replaced."""

    @property
    def has_moved(self) -> bool:
        """Whether some tensor has moved, so that the plan must be rebuilt."""
        return self.places.have_moved

    @property
    def kernels(self) -> tuple[BoundKernel, ...]:
        """Calls that launch a kernel."""
        return tuple(call for call in self.calls if isinstance(call, BoundKernel))

    def launch(self) -> None:
        """Make all calls on the current stream of the device. No tensor may have moved."""
        with torch.no_grad(), current_device(self.device):
            for call in self.calls:
                call()


def require_flat(
    where: str, tensor: Tensor, numel: int, dtypes: Sequence[torch.dtype], device: torch.device
) -> None:
    """Raise LayoutError unless a tensor is [numel], contiguous, of the given dtypes and device."""
    is_flat = tuple(tensor.shape) == (numel,) and tensor.is_contiguous()
    if not is_flat or tensor.dtype not in dtypes or tensor.device != device:
        raise LayoutError(
            f"{where}: expected [{numel}] {' or '.join(map(str, dtypes))} on {device}, contiguous, "
            f"got {list(tensor.shape)} {tensor.dtype} on {tensor.device} with strides "
            f"{list(tensor.stride())}. Pass a flat view of what this rank owns."
        )


def current_device(device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which ``device`` is the current CUDA device."""
    here = device.type != "cuda" or torch.cuda.current_device() == device.index
    return nullcontext() if here else torch.cuda.device(device)


def is_capturing(device: torch.device) -> bool:
    """Return whether the current stream is capturing a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def check_backend(backend: str) -> None:
    """Raise ConfigError for an unknown backend."""
    if backend not in get_args(Backend):
        raise ConfigError(
            f"backend: expected {' or '.join(get_args(Backend))}, got '{backend}'. Write auto, "
            "which uses kernels where they run."
        )


def takes_kernels(backend: str, device: torch.device, *, e4m3: bool = True) -> bool:
    """Return whether to run kernels on ``device``; E4M3 requires compute capability 8.9."""
    check_backend(backend)
    return backend == "auto" and (has_kernels if e4m3 else runs_triton)(device)


def runs_triton(device: torch.device) -> bool:
    """Return whether Triton kernels run on ``device``."""
    return device.type == "cuda" and find_spec("triton") is not None


@cache
def has_kernels(device: torch.device) -> bool:
    """Return whether Triton can encode E4M3 on ``device``."""
    return runs_triton(device) and torch.cuda.get_device_capability(device) >= (8, 9)
