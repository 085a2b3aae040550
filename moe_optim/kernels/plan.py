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
"""``auto`` takes kernels where they run, ``reference`` takes plain torch everywhere."""

Call = Callable[[], object]
"""One launch of a kernel, or a function of plain torch."""

ALIGNMENT = 16
"""Bytes of the widest memory access."""


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
            kernel: function decorated with ``triton.jit``.
            grid: number of programs, at least 1; along two axes where there are two.
            *arguments: tensors and integers, the first parameters of the kernel in their order.
            num_warps: warps of a program.
            registers: limit of registers a thread; by default the compiler's choice.
            **constants: last parameters of the kernel, by name. Those between are given to every
                launch.
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
        """Launch on the current stream of the current device, on which the arguments lie.

        Args:
            *given: arguments of this launch, of the types and alignment of the first launch's.
        """
        if self._launch is not None:
            self._launch(*self.arguments, *given, *self._last)
            return
        compiled = self.kernel[self.grid](*self.arguments, *given, **self.constants, **self.options)
        self._launch = compiled[self.grid]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Plan:
    """Calls in a fixed order, and the tensors whose addresses they have.

    Building a plan chooses between kernels and plain torch; launching it does not. Where all calls
    are kernels, a launch plans, allocates and waits for nothing, so that a CUDA graph can capture
    it once it has run outside of one.
    """

    device: torch.device
    """Device of all tensors."""
    calls: tuple[Call, ...]
    """Calls in their order."""
    places: Places = Places(())
    """Tensors whose addresses kernels have, and whose memory can be freed or exchanged."""

    @property
    def has_moved(self) -> bool:
        """Whether some tensor lies elsewhere by now, so that a new plan has to be built."""
        return self.places.have_moved

    @property
    def kernels(self) -> tuple[BoundKernel, ...]:
        """The calls that launch a kernel."""
        return tuple(call for call in self.calls if isinstance(call, BoundKernel))

    def launch(self) -> None:
        """Make all calls, on the current stream of the device. Nothing may have moved."""
        with torch.no_grad(), current_device(self.device):
            for call in self.calls:
                call()


def require_flat(
    where: str, tensor: Tensor, numel: int, dtypes: Sequence[torch.dtype], device: torch.device
) -> None:
    """Raise LayoutError unless a tensor is flat, contiguous, of a dtype and on the device."""
    is_flat = tuple(tensor.shape) == (numel,) and tensor.is_contiguous()
    if not is_flat or tensor.dtype not in dtypes or tensor.device != device:
        raise LayoutError(
            f"{where}: expected [{numel}] {' or '.join(map(str, dtypes))} on {device}, contiguous, "
            f"got {list(tensor.shape)} {tensor.dtype} on {tensor.device} with strides "
            f"{list(tensor.stride())}. Pass a flat view of what this rank owns."
        )


def current_device(device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which ``device`` is the one that kernels are launched on."""
    here = device.type != "cuda" or torch.cuda.current_device() == device.index
    return nullcontext() if here else torch.cuda.device(device)


def is_capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph of ``device`` is being captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def check_backend(backend: str) -> None:
    """Raise ConfigError for an unknown backend."""
    if backend not in get_args(Backend):
        raise ConfigError(
            f"backend: expected {' or '.join(get_args(Backend))}, got '{backend}'. Write auto, "
            "which takes kernels where they run."
        )


def takes_kernels(backend: str, device: torch.device, *, e4m3: bool = True) -> bool:
    """Return whether kernels of this package are to run on ``device``.

    Args:
        backend: value of ``Backend``.
        device: device of the tensors.
        e4m3: whether the kernels convert to E4M3, which takes a GPU of compute capability 8.9.

    Raises:
        ConfigError: unknown backend.
    """
    check_backend(backend)
    return backend == "auto" and (has_kernels if e4m3 else runs_triton)(device)


def runs_triton(device: torch.device) -> bool:
    """Return whether any kernel of this package runs on ``device``."""
    return device.type == "cuda" and find_spec("triton") is not None


@cache
def has_kernels(device: torch.device) -> bool:
    """Return whether Triton can encode E4M3 on ``device``."""
    return runs_triton(device) and torch.cuda.get_device_capability(device) >= (8, 9)
