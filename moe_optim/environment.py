"""Finds installed packages, their versions and folders without importing them."""

import importlib.metadata
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from moe_optim.version import VERSION

NEEDED: Mapping[str, str] = {
    "python": ">=3.12", "torch": ">=2.11", "megatron-core": ">=0.19,<0.21",
}  # fmt: skip
"""Supported versions, as in ``pyproject.toml``."""

MODULES: Mapping[str, str] = {
    "torch": "torch",
    "megatron-core": "megatron.core",
    "transformer-engine": "transformer_engine",
    "apex": "apex.optimizers",  # `apex` alone may be an unrelated web toolkit
    "emerging-optimizers": "emerging_optimizers",
    "triton": "triton",
    "pybind11": "pybind11",
}
"""Module that indicates the presence of each package."""

_REMEDIES = {
    "python": "Build the environment with another Python: make clean train PYTHON=/path/to/python",
    "torch": "pip install 'torch{needed}'",
    "megatron-core": "pip install 'moe_optim[megatron]'",
    "transformer-engine": "pip install --no-build-isolation 'moe_optim[te]'",
    "apex": "Build NVIDIA's apex from its sources; the package index has an unrelated one",
    "triton": "pip install 'triton{needed}'",
    "pybind11": "pip install 'pybind11{needed}'",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """A package as ``import`` would find it."""

    name: str
    version: str  # version; unknown if not recorded
    path: str  # folder of the package, or the interpreter
    checkout: bool  # whether it is imported from sources rather than an installation

    def __str__(self) -> str:
        where = f" from the source checkout {self.path}" if self.checkout else ""
        return self.version + where


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """A CUDA device."""

    name: str
    sm: int  # compute capability without the dot: 90 for Hopper, 100 for Blackwell
    memory_gib: float


def find_package(name: str) -> Package | None:
    """Return the package that ``import`` finds for a key of ``MODULES`` or ``python``, if any."""
    if name == "python":
        return Package(
            name=name, version=platform.python_version(), path=sys.executable, checkout=False
        )
    folder = find_folder(MODULES[name])
    if folder is None:
        return None
    try:
        root = importlib.metadata.distribution(name).locate_file("")
        is_installed = Path(str(root)).resolve() in folder.resolve().parents
    except importlib.metadata.PackageNotFoundError:
        is_installed = bool({"site-packages", "dist-packages"} & set(folder.parts))
    return Package(
        name=name, version=_version(name, folder), path=str(folder), checkout=not is_installed
    )


def find_folder(module: str) -> Path | None:
    """Return the folder of a dotted module, without importing it or its parents."""
    spec: ModuleSpec | None = None
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        search = spec.submodule_search_locations or [] if spec else None
        found = (f.find_spec(".".join(parts[:depth]), search, None) for f in sys.meta_path)
        spec = next(filter(None, found), None)
        if spec is None:
            return None
    return Path(spec.origin).parent if spec and spec.origin else None


def missing_for_datasets() -> str | None:
    """Return what Megatron's C++ dataset helper lacks, with a remedy, None if nothing.

    A checkout compiles it with ``make`` and pybind11; the megatron-core wheel ships it prebuilt.
    """
    folder = find_folder("megatron.core.datasets")
    if folder is None or not (folder / "Makefile").is_file() or find_folder("pybind11"):
        return None
    if any(folder.glob("helpers_cpp.*")):
        return None
    return (
        f"{folder} needs pybind11 to compile its helper; it is not installed. "
        f"{_REMEDIES['pybind11'].format(needed='')}"
    )


def find_versions() -> dict[str, str]:
    """Return the versions of this package, Python, and all installed ``MODULES``."""
    found = {name: find_package(name) for name in ("python", *MODULES)}
    own = {"moe_optim": VERSION}
    return own | {name: package.version for name, package in found.items() if package is not None}


def find_gpus() -> tuple[Gpu, ...]:
    """Return the CUDA devices of this machine, as reported by torch."""
    import torch  # slow import, only for recipes that require a GPU

    if not torch.cuda.is_available():
        return ()
    devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return tuple(
        Gpu(name=d.name, sm=10 * d.major + d.minor, memory_gib=round(d.total_memory / 2**30, 1))
        for d in devices
    )


def unmet_version(name: str, needed: str) -> str | None:
    """Return why an installed version does not match ``needed``, with a remedy; None if it does.

    ``name`` is ``python`` or a key of ``MODULES``. A pre-release counts as its release: NVIDIA's
    containers ship torch 2.x.0a0.
    """
    package = find_package(name)
    if package is not None and satisfies(package.version, needed):
        return None
    remedy = _REMEDIES[name].format(needed=needed)
    if package is not None and package.checkout:
        remedy = f"Check out a version {needed} there, or take it off PYTHONPATH and {remedy}"
    return f"{name}: expected {needed}, got {package or 'none'}. {remedy}"


def satisfies(version: str, needed: str) -> bool:
    """Return whether a version matches a specifier; a pre-release counts as its release."""
    try:
        return SpecifierSet(needed).contains(Version(version).base_version)
    except InvalidVersion:  # unknown version: trust the user
        return True


def _version(name: str, folder: Path) -> str:
    if name == "megatron-core":  # metadata would describe the wheel even if a checkout is imported
        return read_core_version(folder)
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def read_core_version(folder: Path) -> str:
    """Read megatron-core's version from its folder; ``unknown`` if not found.

    Importing the package would take seconds and run git.
    """
    try:
        text = (folder / "package_info.py").read_text()
    except OSError:
        return "unknown"
    parts = [re.search(rf"^{part} = (\d+)", text, re.M) for part in ("MAJOR", "MINOR", "PATCH")]
    suffix = re.search(r"^PRE_RELEASE = ['\"](\w*)['\"]", text, re.M)
    if not all(parts):
        return "unknown"
    return ".".join(part[1] for part in parts if part) + (suffix[1] if suffix else "")
