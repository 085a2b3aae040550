"""Runs Megatron's own training loop over gloo on a machine without a GPU.

Megatron 0.19 assumes CUDA in four ways, all redirected here: ``torch.cuda.*`` calls;
``device="cuda"``, ``Tensor.cuda()`` and pinned memory, rewritten on every call into torch, where
``to("cpu")`` copies as it would from a GPU; names of types, such as "torch.cuda.BFloat16Tensor";
and, by rows ``ADAM`` and ``CPU`` of the patch table, fused optimizers, split sizes, and all-gathers
of several dtypes at once.

Transformer Engine and apex are hidden unless already imported, since Megatron would step with their
kernels. :func:`install` and :func:`uninstall` must be called from the main thread. A single random
stream replaces the two of a GPU machine, so with dropout a resumed run draws other numbers than an
uninterrupted one. CPU recipes set dropout to zero.
"""

import importlib
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from operator import attrgetter
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, NoReturn

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from moe_optim.errors import ConfigError, PatchError, StateError
from moe_optim.integration import patches
from moe_optim.integration.engine import apply_patches, original, revert_patches

CPU = torch.device("cpu")
GPU_PACKAGES = ("transformer_engine", "apex")
LEGACY_TYPE = torch.Tensor.type
PATCHES = (*patches.ADAM, *patches.CPU, *patches.DATASETS)
TE_IMPORTERS = ("megatron.bridge.peft.lora_layers",)
"""Modules that import Transformer Engine without a guard."""
_TE_NAMES = ("transformer_engine", "transformer_engine.pytorch")


class _Event(torch.cpu.Event):
    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def elapsed_time(self, _end: "_Event") -> float:
        return 0.0  # CPU events are not timed


class _Stream(torch.cpu.Stream):
    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()
        self.cuda_stream = 0
        self.device = CPU

    def synchronize(self) -> None:
        pass  # CPU calls complete before they return

    def record_event(self, event: _Event | None = None) -> _Event:  # type: ignore[override]
        return event or _Event()


_THE_STREAM = _Stream()


class _StreamContext(torch.cpu.StreamContext):
    def __init__(self, stream: Any = None) -> None:
        super().__init__(stream)


def _memory(name: str, file: str = "/proc/self/status") -> int:
    (kib,) = re.findall(rf"^{name}:\s+(\d+) kB$", Path(file).read_text(), re.M)
    return int(kib) * 1024  # Linux writes kB and means KiB


def _resident_bytes(*_: Any, **__: Any) -> int:
    return _memory("VmRSS")  # tensors, code and everything else


def _peak_resident_bytes(*_: Any, **__: Any) -> int:
    return _memory("VmHWM")


def _memory_stats(*_: Any, **__: Any) -> dict[str, float]:
    stats: dict[str, float] = {"allocation.all.current": math.nan}  # allocations are not counted
    for kind in ("allocated_bytes", "reserved_bytes"):
        stats |= {f"{kind}.all.current": _memory("VmRSS"), f"{kind}.all.peak": _memory("VmHWM")}
    return stats


_NOTHING = (
    "cuda.set_device", "cuda.synchronize", "cuda.set_stream", "cuda.empty_cache",
    "cuda.reset_peak_memory_stats",
    "Tensor.record_stream",  # checks its argument before any TorchFunctionMode
)  # fmt: skip
REDIRECTS: Mapping[str, Any] = {
    **{name: lambda *_, **__: None for name in _NOTHING},  # dynamo maps each function to one rule
    "cuda.is_available": lambda: True,
    "cuda.is_initialized": lambda: True,  # torch.cuda's lazy calls then run at once
    "cuda.device_count": lambda: 1,
    "cuda.current_device": lambda: CPU,
    "cuda.get_device_capability": lambda *_: (8, 0),  # minimum for --moe-grouped-gemm
    "cuda.get_device_name": lambda *_: "cpu",
    "cuda.get_device_properties": lambda *_, **__: SimpleNamespace(
        name="cpu", major=8, minor=0, total_memory=0, multi_processor_count=1
    ),
    "cuda.Stream": _Stream,
    "cuda.Event": _Event,
    "cuda.stream": _StreamContext,
    "cuda.current_stream": lambda *_: _THE_STREAM,
    "cuda.default_stream": lambda *_: _THE_STREAM,
    "cuda.is_current_stream_capturing": lambda: False,
    "cuda.memory_stats": _memory_stats,
    "cuda.memory_allocated": _resident_bytes,
    "cuda.memory_reserved": _resident_bytes,
    "cuda.max_memory_allocated": _peak_resident_bytes,
    "cuda.max_memory_reserved": _peak_resident_bytes,
    "cuda.device_memory_used": lambda *_, **__: (
        _memory("MemTotal", "/proc/meminfo") - _memory("MemAvailable", "/proc/meminfo")
    ),
    "cuda.manual_seed": torch.default_generator.manual_seed,
    "cuda.manual_seed_all": torch.default_generator.manual_seed,
    "cuda.get_rng_state": lambda *_, **__: torch.get_rng_state(),
    "cuda.set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
    "cuda.random.get_rng_state": lambda *_, **__: torch.get_rng_state(),
    "cuda.random.set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
    "cuda.default_generators": dict.fromkeys((CPU, 0), torch.default_generator),
    "accelerator.is_available": lambda: False,  # data loaders then pin no memory
    "_inductor.config.triton_disable_device_detection": True,  # else torch 2.15 queries the GPU
}
"""Replacements while the runtime is installed, by name within ``torch``."""


def _on_cpu(value: Any) -> Any:
    names_gpu = (
        value.type == "cuda"
        if isinstance(value, torch.device)
        else type(value) is int or (isinstance(value, str) and value.startswith("cuda"))
    )
    return CPU if names_gpu else value


def _names_host(args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> bool:
    # a torch.device may be the tensor's current device
    device = args[1] if len(args) > 1 else (kwargs or {}).get("device")
    return isinstance(device, str) and device == "cpu"


def _legacy_type(tensor: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Accept and return type names of CUDA tensors, as ``Tensor.type`` does on a GPU."""
    if dtype is None:
        return LEGACY_TYPE(tensor).replace("torch.", "torch.cuda.", 1)
    if isinstance(dtype, str):
        dtype = dtype.replace("torch.cuda.", "torch.", 1)
    return LEGACY_TYPE(tensor, dtype, *args, **kwargs)


class _CudaNamesOnCpu(TorchFunctionMode):
    """Rewrites devices, pinning and type names of every call into torch."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func is LEGACY_TYPE:
            return _legacy_type(*args, **(kwargs or {}))
        is_move = func is torch.Tensor.to
        if func is torch.Tensor.cpu or (is_move and _names_host(args, kwargs)):
            on_host = func(*args, **(kwargs or {}))
            return on_host.to(CPU, copy=True) if on_host is args[0] else on_host
        if kwargs:
            if "device" in kwargs:
                kwargs["device"] = _on_cpu(kwargs["device"])
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
        if is_move and len(args) > 1:
            args = (args[0], _on_cpu(args[1]), *args[2:])
        return func(*args, **(kwargs or {}))


def maybe_move_tensor_to_cpu(
    tensor: Any, as_numpy: bool = False, record_stream: bool = False
) -> Any:
    """Return ``tensor``, already on the host, or a NumPy view of it."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


_GATHER = torch.distributed.all_gather_into_tensor  # call counters replace the name in torch


def all_gather_bytes(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """All-gather like ``torch.distributed.all_gather_into_tensor``, as bytes.

    Megatron gathers the buckets of a group in one call. With virtual pipeline stages and fp32
    parameters they have two dtypes, for which gloo silently corrupts the result: it uses the
    element size of the first tensor for all.
    """
    return _GATHER(_bytes_of(output_tensor), _bytes_of(input_tensor), group, async_op)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a byte view of a tensor that lives as long as the tensor.

    If a gloo thread dropped the last reference, it would need the Python interpreter, and abort a
    process that is shutting down.
    """
    view = _BYTES[tensor] = tensor.detach().view(torch.uint8)
    return view


def is_inference_column_parallel_linear(module: Any) -> bool:
    """Return False: the classes in question are Transformer Engine's."""
    return False


def get_gpt_mtp_block_spec(
    config: Any, spec: Any, use_transformer_engine: bool, *args: Any, **kwargs: Any
) -> Any:
    """Return Megatron's spec of multi-token prediction, local where there is only a local one."""
    is_there = use_transformer_engine and sys.modules.get("transformer_engine") is not None
    return original(_MTP_SPEC)(config, spec, is_there, *args, **kwargs)


_MTP_SPEC = "megatron.core.models.gpt.gpt_layer_specs:get_gpt_mtp_block_spec"

_BYTES: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # byte view of each gathered tensor

_RNG_LOGGER = logging.getLogger("megatron.core.tensor_parallel.random")
"""Warns on every draw from the host's random stream, the only one here."""

_mode: _CudaNamesOnCpu | None = None
_saved: dict[str, Any] = {}
_saved_log_level = logging.NOTSET
_hidden: tuple[str, ...] = ()


def _owner(name: str) -> tuple[Any, str]:
    path, _, last = name.rpartition(".")
    return attrgetter(path)(torch), last


def is_installed() -> bool:
    """Return whether this process runs Megatron on the CPU."""
    return _mode is not None


def use_cpu() -> None:
    """Let Megatron train on this machine's CPU, over gloo. Idempotent.

    Every rank must call it, before the first import of ``megatron`` and from the training thread.
    Afterwards ``torch.cuda`` and ``device="cuda"`` mean the CPU in this process, and
    ``torch.cuda.is_available()`` returns True; detect GPUs before the call. A later call is
    accepted if ``TORCHDYNAMO_DISABLE=1`` was set when Megatron was imported, since nothing was
    compiled for a GPU.

    Raises:
        ConfigError: machine has a GPU, which would be hidden.
        StateError: Megatron was imported before and passed functions to torch's compiler; nothing
            is redirected.
        PatchError: Megatron's version is not supported; nothing stays redirected.
    """
    global _mode, _saved_log_level, _hidden
    if _mode is not None:
        return
    if torch.cuda.is_available():
        raise ConfigError(
            "cpu_runtime: expected a machine without a usable GPU, got "
            f"{torch.cuda.device_count()}. Set CUDA_VISIBLE_DEVICES='' to train on the CPU here."
        )
    _require_nothing_compiled()
    _hidden = hide_gpu_packages()
    if "transformer_engine" in _hidden:
        sys.meta_path.insert(0, _TE_FINDER)
    # jit_fuser compiles with dynamo, which takes minutes on a CPU without benefit
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    # required by Megatron with tensor parallelism; without effect on a CPU
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    # on first import dynamo maps torch's functions to rules, each under a single name
    importlib.import_module("torch._dynamo")
    for name, replacement in REDIRECTS.items():
        owner, last = _owner(name)
        _saved[name] = getattr(owner, last)
        setattr(owner, last, replacement)
    _saved_log_level = _RNG_LOGGER.level
    _RNG_LOGGER.setLevel(logging.ERROR)
    _mode = _CudaNamesOnCpu()
    _mode.__enter__()
    try:
        apply_patches(PATCHES, "cpu runtime")
    except PatchError:
        uninstall()
        raise


install = use_cpu
"""Name used within this package."""


def hide_gpu_packages() -> tuple[str, ...]:
    """Make imports of GPU-only packages fail; return the packages hidden by this call."""
    hidden = tuple(name for name in GPU_PACKAGES if name not in sys.modules)
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # makes the import fail
    return hidden


def _require_nothing_compiled() -> None:
    """Raise StateError if an import of Megatron has passed functions to torch's compiler."""
    loaded = [name for name in sys.modules if name.partition(".")[0] == "megatron"]
    for name, module in ((name, sys.modules[name]) for name in loaded):
        for attribute, value in vars(module).items():
            if isinstance(value, FunctionType) and hasattr(value, "_torchdynamo_orig_callable"):
                raise StateError(
                    "moe_optim.use_cpu: expected to be called before the first import of megatron, "
                    f"got {name}.{attribute} set up to be compiled for a GPU. Move the call above "
                    "everything that imports megatron, moe_optim.install() included, or start with "
                    "TORCHDYNAMO_DISABLE=1 in the environment."
                )


def uninstall() -> None:
    """Restore torch and Megatron; no-op if not installed."""
    global _mode
    if _mode is None:
        return
    revert_patches(reversed(PATCHES), "cpu runtime")
    _mode.__exit__(None, None, None)
    _mode = None
    _RNG_LOGGER.setLevel(_saved_log_level)
    if _TE_FINDER in sys.meta_path:
        sys.meta_path.remove(_TE_FINDER)
    for name in _hidden:
        del sys.modules[name]
    while _saved:
        name, original = _saved.popitem()
        owner, last = _owner(name)
        setattr(owner, last, original)


# Stand-in for Transformer Engine in Megatron-Bridge, which guards its imports of it except in one
# module, which is imported with the package


class _MissingPackage(type):
    """Class of classes without instances, whose attributes are further ones."""

    def __getattr__(cls, name: str) -> "_MissingPackage":
        if name.startswith("__"):
            raise AttributeError(name)
        return _MissingPackage(f"{cls.__name__}.{name}", (), {})

    def __call__(cls, *_: Any, **__: Any) -> NoReturn:
        raise ConfigError(
            f"{cls.__name__}: expected Transformer Engine, got a run on the CPU, which hides it. "
            "Turn off the feature that needs it (use_transformer_engine_op_fuser for LoRA), or "
            "train on a GPU."
        )


class _TeFinder:
    """A meta path finder that lets :data:`TE_IMPORTERS`, and no other module, find the stand-in."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: Any = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in TE_IMPORTERS else None
        if spec is not None and spec.loader is not None:
            execute = partial(_execute_with_stand_in, spec.loader.exec_module)
            spec.loader.exec_module = execute  # type: ignore[method-assign]
        return spec


_TE_FINDER = _TeFinder()


def _execute_with_stand_in(run: Callable[[ModuleType], None], module: ModuleType) -> None:
    before = {name: sys.modules.pop(name) for name in _TE_NAMES if name in sys.modules}
    package: Any = _MissingPackage(_TE_NAMES[0], (), {})
    sys.modules |= {_TE_NAMES[0]: package, _TE_NAMES[1]: package.pytorch}
    try:
        run(module)
    finally:
        for name in _TE_NAMES:
            del sys.modules[name]
        sys.modules |= before
