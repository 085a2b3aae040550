"""Stands in for Transformer Engine, which the CPU runtime hides, in Megatron-Bridge.

It guards its imports of it except in one module, which is imported with the package.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, NoReturn

from moe_optim.errors import ConfigError

IMPORTERS = ("megatron.bridge.peft.lora_layers",)
"""Modules that import Transformer Engine without a guard."""
NAMES = ("transformer_engine", "transformer_engine.pytorch")


class _Missing(type):
    """Class of classes without instances, whose attributes are further ones."""

    def __getattr__(cls, name: str) -> "_Missing":
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{cls.__name__}.{name}", (), {})

    def __call__(cls, *_: Any, **__: Any) -> NoReturn:
        raise ConfigError(
            f"{cls.__name__}: expected Transformer Engine, got a run on the CPU, which hides it. "
            "Turn off the feature that needs it (use_transformer_engine_op_fuser for LoRA), or "
            "train on a GPU."
        )


class _Finder:
    """A meta path finder that lets :data:`IMPORTERS`, and no other module, find the stand-in."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: Any = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in IMPORTERS else None
        if spec is not None and spec.loader is not None:
            execute = partial(_execute, spec.loader.exec_module)
            spec.loader.exec_module = execute  # type: ignore[method-assign]
        return spec


_FINDER = _Finder()


def _execute(run: Callable[[ModuleType], None], module: ModuleType) -> None:
    before = {name: sys.modules.pop(name) for name in NAMES if name in sys.modules}
    package: Any = _Missing(NAMES[0], (), {})
    sys.modules |= {NAMES[0]: package, NAMES[1]: package.pytorch}
    try:
        run(module)
    finally:
        for name in NAMES:
            del sys.modules[name]
        sys.modules |= before


def install() -> None:
    """Let :data:`IMPORTERS` be imported without Transformer Engine. Must be called once."""
    sys.meta_path.insert(0, _FINDER)


def uninstall() -> None:
    """Undo :func:`install`; modules imported meanwhile keep the stand-in."""
    if _FINDER in sys.meta_path:
        sys.meta_path.remove(_FINDER)
