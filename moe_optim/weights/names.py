"""Names of parameters, whatever wraps the model: DDP, torch.compile, or adapters such as LoRA's.

Megatron-Bridge's ``AdapterWrapper`` holds the linear as ``to_wrap``, and what it adds as
``adapter``. Keys of checkpoints are those of the linear alone, and of the adapter behind
``adapter.``.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

BASE = "to_wrap"
"""Child of a wrapper: the module that it wraps."""
ADAPTER = "adapter"
"""Child of a wrapper: what is trained beside it."""
_WRAPPERS = {"module", "_orig_mod", BASE}
"""Components that wrappers put into the names of what they wrap."""


def is_wrapper(module: torch.nn.Module) -> bool:
    """Return whether a module is an adapter around another one, told by its children."""
    children = module._modules
    return children.get(BASE) is not None and ADAPTER in children


def base_of(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside of an adapter; itself where there is none."""
    return module.get_submodule(BASE) if is_wrapper(module) else module


def unwrapped_name(name: str) -> str:
    """Return a name without the components that wrappers put into it, wherever they stand."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def parameter_names(model_chunks: Iterable[torch.nn.Module]) -> dict[torch.nn.Parameter, str]:
    """Return the unwrapped name of every parameter; those of several chunks may be alike."""
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
    """Return a name with its layers numbered over all pipeline stages, as checkpoints number them.

    Args:
        name: unwrapped name of a parameter or a module of one chunk.
        modules: modules of the chunk, by unwrapped name.
    """

    def renumber(found: re.Match[str]) -> str:
        number = getattr(modules.get(name[: found.end()]), "layer_number", None)
        return found[0] if number is None else f"layers.{number - 1}"

    return _LAYER.sub(renumber, name)


def global_parameter_names(
    model_chunks: Iterable[torch.nn.Module],
) -> dict[torch.nn.Parameter, str]:
    """Return the name of every parameter as checkpoints have it: layers count over all stages."""
    names = {}
    for chunk in model_chunks:
        modules = modules_by_name(chunk)
        for name, param in chunk.named_parameters():
            names[param] = with_global_layers(unwrapped_name(name), modules)
    return names
