"""Linears behind adapters, such as LoRA's, as Megatron-Bridge wraps them.

Its ``AdapterWrapper`` holds the linear as ``to_wrap`` and what it adds as ``adapter``. Keys of
checkpoints are those of the linear alone, and of the adapter behind ``adapter.``.
"""

from torch.nn import Module

BASE = "to_wrap"
"""Of a wrapper: the module that it wraps."""
ADAPTER = "adapter"
"""Of a wrapper: what is trained beside it."""


def is_wrapper(module: Module) -> bool:
    """Return whether a module is an adapter around another one, told by its children."""
    children = module._modules
    return children.get(BASE) is not None and ADAPTER in children


def base_of(module: Module) -> Module:
    """Return the module inside of an adapter; itself where there is none."""
    return module.get_submodule(BASE) if is_wrapper(module) else module
