"""Imports modules of an unpacked package with stand-ins for their dependencies.

Recipes of Megatron-Bridge are functions that set fields of configurations. Their modules import
models, Transformer Engine and Hugging Face converters, but only set attributes on them or
instantiate them.
"""

import importlib
import os
import sys
from abc import ABCMeta
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any


def find_bridge() -> Path | None:
    """Return the folder of ``MEGATRON_BRIDGE_PATH`` that contains Megatron-Bridge, or None."""
    folders = map(Path, filter(None, os.environ.get("MEGATRON_BRIDGE_PATH", "").split(":")))
    return next((folder for folder in folders if (folder / "megatron/bridge").is_dir()), None)


class _AnyCall(ABCMeta):  # of which classes with abstract methods are, too
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: cls()


class StandIn(metaclass=_AnyCall):
    """Accepts any argument and attribute; unset attributes are None, any call returns another one.

    ``UNSET`` contains attributes with another initial value.
    """

    UNSET: Mapping[str, Any] = {}

    def __init__(self, *_: Any, **fields: Any) -> None:
        vars(self).update(fields)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(self).UNSET.get(name)

    def __call__(self, *_: Any, **__: Any) -> "StandIn":
        return type(self)()


class _Loader(Loader):
    def __init__(self, bases: Mapping[str, type[StandIn]]) -> None:
        self._bases = bases

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Make every name of the module resolve to a new class."""

        def find(name: str) -> type[StandIn]:
            if name.startswith("__"):
                raise AttributeError(name)
            found = (base for part, base in self._bases.items() if part in (module.__name__, name))
            made = type(name, (next(found, self._base_of(module)),), {})
            setattr(module, name, made)
            return made

        module.__getattr__ = find  # type: ignore[method-assign]

    def _base_of(self, module: ModuleType) -> type[StandIn]:
        prefixes = (name for name in self._bases if module.__name__.startswith(f"{name}."))
        return self._bases.get(next(prefixes, ""), StandIn)


class _Finder(MetaPathFinder):
    """Finds the real modules of one package in a folder, and stand-ins for all others."""

    def __init__(self, folder: Path, package: str, real: Collection[str], loader: Loader) -> None:
        self._folder, self._package, self._real, self._loader = folder, package, real, loader

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        if not f"{name}.".startswith(f"{self._package}."):
            return None
        if any(f"{name}.".startswith(f"{real}.") for real in self._real):
            path = self._folder.joinpath(*name.split("."))
            if path.is_dir():
                init = path / "__init__.py"
                return spec_from_file_location(name, init, submodule_search_locations=[str(path)])
            if path.with_suffix(".py").is_file():
                return spec_from_file_location(name, path.with_suffix(".py"))
        return ModuleSpec(name, self._loader, is_package=True)


class _Absent(MetaPathFinder):
    """Finds stand-ins for modules that no other finder finds."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        if name.partition(".")[0] in sys.stdlib_module_names:  # optional modules of Python itself
            return None
        return ModuleSpec(name, self._loader, is_package=True)


class _Hidden(MetaPathFinder):
    """Finds stand-ins for some packages, installed or not."""

    def __init__(self, packages: Collection[str], loader: Loader) -> None:
        self._packages, self._loader = packages, loader

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        if not any(f"{name}.".startswith(f"{package}.") for package in self._packages):
            return None
        return ModuleSpec(name, self._loader, is_package=True)


@contextmanager
def standing_in(
    folder: Path,
    package: str,
    real: Collection[str],
    bases: Mapping[str, type[StandIn]],
    hidden: Collection[str] = (),
) -> Iterator[None]:
    """Make ``package`` importable from ``folder`` within the context, with stand-ins for missing
    modules.

    Modules imported before stay real unless hidden; imports within the context are undone.

    Args:
        folder: folder that contains the package.
        package: package whose modules are stand-ins, except those in ``real``.
        real: modules of the package, and subpackages with all their modules.
        bases: name of a class, module or package -> base class of its stand-ins.
        hidden: packages that are stand-ins even if installed.
    """
    loader = _Loader(bases)
    first = [_Finder(folder, package, real, loader), _Hidden(hidden, loader)]
    finders_before, before = list(sys.meta_path), dict(sys.modules)
    for name in [name for name in before if name.partition(".")[0] in hidden]:
        del sys.modules[name]
    sys.meta_path[:] = [*first, *finders_before, _Absent(loader)]
    try:
        yield
    finally:
        sys.meta_path[:] = finders_before
        for name in list(sys.modules):
            if sys.modules[name] is not before.get(name):
                del sys.modules[name]
        sys.modules.update(before)
        importlib.invalidate_caches()


def stand_in_for(
    packages: Collection[str], bases: Mapping[str, type[StandIn]] | None = None
) -> None:
    """Make these packages stand-ins for the rest of the process; bases as in ``standing_in``."""
    sys.meta_path.insert(0, _Hidden(packages, _Loader(bases or {})))
