"""Parameter names independent of wrappers: DDP, torch.compile, or adapters such as LoRA.

Megatron-Bridge's ``AdapterWrapper`` stores the linear as ``to_wrap`` and its own parameters as
``adapter``. Checkpoint keys omit ``to_wrap`` and keep ``adapter.``.
"""

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import torch

BASE = "to_wrap"
"""Child of an adapter wrapper: the wrapped module."""
ADAPTER = "adapter"
"""Child of an adapter wrapper: the trained adapter."""
_WRAPPERS = {"module", "_orig_mod", BASE}
"""Name components that wrappers insert."""


def is_wrapper(module: torch.nn.Module) -> bool:
    """Return whether a module is an adapter wrapper, judging by its children."""
    children = module._modules
    return children.get(BASE) is not None and ADAPTER in children


def base_of(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside an adapter wrapper, or the module itself."""
    return module.get_submodule(BASE) if is_wrapper(module) else module


@lru_cache(maxsize=1 << 16)
def unwrapped_name(name: str) -> str:
    """Return a name without the components that wrappers insert."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def parameter_names(model_chunks: Iterable[torch.nn.Module]) -> dict[torch.nn.Parameter, str]:
    """Return the unwrapped name of every parameter; names can repeat across chunks."""
    return {
        param: unwrapped_name(name)
        for chunk in model_chunks
        for name, param in chunk.named_parameters()
    }


def modules_by_name(chunk: torch.nn.Module) -> dict[str, Any]:
    """Return every module of a chunk by its unwrapped name."""
    return {unwrapped_name(name): module for name, module in chunk.named_modules()}


_LAYER = re.compile(r"(?<![^.])layers\.(\d+)(?![^.])")


def with_global_layers(name: str, modules: Mapping[str, torch.nn.Module]) -> str:
    """Return an unwrapped name with layers numbered over all pipeline stages, as in checkpoints."""

    def renumber(found: re.Match[str]) -> str:
        number = getattr(modules.get(name[: found.end()]), "layer_number", None)
        return found[0] if number is None else f"layers.{number - 1}"

    return _LAYER.sub(renumber, name)


def global_parameter_names(
    model_chunks: Iterable[torch.nn.Module],
) -> dict[torch.nn.Parameter, str]:
    """Return the checkpoint name of every parameter, with layers numbered over all stages."""
    names = {}
    for chunk in model_chunks:
        modules = modules_by_name(chunk)
        for name, param in chunk.named_parameters():
            names[param] = with_global_layers(unwrapped_name(name), modules)
    return names
