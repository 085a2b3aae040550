"""Single files of packages that are not installed, imported where their wheels lie unpacked."""

import sys
from functools import cache
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

import pytest

SOURCES = {
    "transformer_engine": "transformer-engine==2.20.2",
    "modelopt": "nvidia-modelopt==0.47.0",
}


def import_source(name, given):
    """Import one module of a package that may not be installed, past every ``__init__``.

    Args:
        name: full name of the module.
        given: modules that it must not import, each with the names it may take from them.
    """
    package = name.partition(".")[0]
    spec = PathFinder.find_spec(package)
    if spec is None:
        pytest.skip(f"no {package} on the path; put the unpacked wheel {SOURCES[package]} there")
    root = Path(spec.submodule_search_locations[0]).parent
    parents = name.split(".")[:-1]
    hollow = [".".join(parents[: depth + 1]) for depth in range(len(parents))]
    known = _pop_modules(package)
    try:
        for module_name in (*hollow, *given):
            module = sys.modules.setdefault(module_name, ModuleType(module_name))
            module.__path__ = [str(root.joinpath(*module_name.split(".")))]
            vars(module).update(given.get(module_name, {}))
        return import_module(name)
    finally:
        _pop_modules(package)
        sys.modules.update(known)


def _pop_modules(package):
    names = [name for name in sys.modules if name.partition(".")[0] == package]
    return {name: sys.modules.pop(name) for name in names}


class _QuantizerBase:
    """What TE's reference quantizers use of their base class."""

    def __init__(self, *, rowwise, columnwise):
        self.rowwise_usage, self.columnwise_usage = rowwise, columnwise


@cache
def te_recipe(name):
    te = "transformer_engine.pytorch"
    base = {"Quantizer": _QuantizerBase, "QuantizedTensorStorage": object}
    given = {
        f"{te}.quantized_tensor": base,
        f"{te}.tensor": {},
        f"{te}.tensor.utils": {"is_custom": None},
    }
    return import_source(f"{te}.custom_recipes.{name}", given)


@cache
def modelopt_tensor(name):
    torch_part = "modelopt.torch"
    quantization = f"{torch_part}.quantization"
    given = {
        f"{quantization}.config": {"QuantizerCfgEntry": None},
        f"{torch_part}.utils": {"get_unwrapped_name": None, "print_rank_0": None},
        f"{torch_part}.utils.network": {"temporarily_remove_accelerate_hook": None},
    }
    core = vars(import_source(f"{quantization}.utils.core_utils", given))
    given = {
        f"{quantization}.backends": {},
        f"{quantization}.backends.utils": {"fp4_compatible": None},
        f"{quantization}.utils": {k: v for k, v in core.items() if not k.startswith("__")},
    }
    return import_source(f"{quantization}.qtensor.{name}", given)
