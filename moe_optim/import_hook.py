"""Gives any program the plug-in's flag, once ``moe-optim enable`` ran.

The line that it writes calls :func:`arm` before the program's first line, and only where the
command line has the flag. So this module imports the standard library alone, and little of it.
"""

import importlib
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

PARENT, TRIGGER = "megatron", "megatron.training"
"""The package that a script imports first, and the module with parser and training loop."""
ENTRY = "moe_optim.integration.script_runner"
"""Has ``before_megatron()`` and ``switch_on()``; imported when Megatron is, and no sooner."""


class _Listener:
    """A finder that finds no module itself, and is called when Megatron is imported.

    It stays until :data:`TRIGGER` was imported: ``importlib.util.find_spec`` imports nothing.
    """

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        """Return None, or for :data:`TRIGGER` the spec of other finders, with ours after it."""
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
    """Switch the plug-in on when this process has imported Megatron's training loop.

    Python may run the line twice: a folder of packages can have two names.
    """
    if _LISTENER not in sys.meta_path:
        sys.meta_path.insert(0, _LISTENER)


def disarm() -> None:
    """Stop listening: the plug-in is switched on by other means."""
    if _LISTENER in sys.meta_path:
        sys.meta_path.remove(_LISTENER)


def _follow(loader: Any) -> None:
    """Switch the plug-in on after ``loader``, which belongs to one spec, has run its module."""
    run = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module  # the method of its class is left
        is_armed = _LISTENER in sys.meta_path
        run(module)
        if is_armed:
            disarm()
            _entry().switch_on()

    loader.exec_module = exec_module


def _entry() -> Any:
    return importlib.import_module(ENTRY)
