"""Adds the plug-in's flag to any Python program, after ``moe-optim enable``.

The line written by ``enable`` calls :func:`arm` before the program starts, if the command line has
the flag. Therefore this module imports only a few standard modules.
"""

import importlib
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

PARENT, TRIGGER = "megatron", "megatron.training"
"""The package that scripts import first, and the module of parser and training loop."""
ENTRY = "moe_optim.integration.script_runner"
"""Module of ``before_megatron()`` and ``switch_on()``; imported with Megatron."""


class _Listener:
    """A meta path finder that reports imports of Megatron and finds no module itself.

    It stays until :data:`TRIGGER` is imported, since ``importlib.util.find_spec`` only looks it up.
    """

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if name == PARENT:
            _entry().before_megatron()
        if name != TRIGGER:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            _follow(spec.loader)
        return spec


_LISTENER = _Listener()


def arm() -> None:
    """Enable the plug-in as soon as this process has imported Megatron's training loop.

    Idempotent, since Python may run the line twice if a site folder has two names.
    """
    if _LISTENER not in sys.meta_path:
        sys.meta_path.insert(0, _LISTENER)


def disarm() -> None:
    """Stop listening, because the plug-in is enabled by other means."""
    if _LISTENER in sys.meta_path:
        sys.meta_path.remove(_LISTENER)


def _follow(loader: Any) -> None:
    """Enable the plug-in after ``loader``, used by a single spec, has executed its module."""
    run = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module  # restores the class's method
        is_armed = _LISTENER in sys.meta_path
        run(module)
        if is_armed:
            disarm()
            _entry().switch_on()

    loader.exec_module = exec_module


def _entry() -> Any:
    return importlib.import_module(ENTRY)
