"""What is installed is found without importing it, and judged by its version."""

import sys

import pytest

from moe_optim import environment
from moe_optim.environment import find_folder, find_package, unmet_version


def put_package(folder, module, source="", numbers=None, pre_release=""):
    """Write an importable package; ``numbers`` makes it a Megatron core of that version."""
    package = folder.joinpath(*module.split("."))
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(source)
    if numbers:
        lines = [
            f"{part} = {n}" for part, n in zip(("MAJOR", "MINOR", "PATCH"), numbers, strict=True)
        ]
        info = "\n".join([*lines, f'PRE_RELEASE = "{pre_release}"', ""])
        (package / "package_info.py").write_text(info)
    return package


def test_a_submodule_is_found_without_running_its_parents(tmp_path, monkeypatch):
    folder = put_package(tmp_path, "heavy.inner", source="raise AssertionError")
    (tmp_path / "heavy" / "__init__.py").write_text("raise AssertionError")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_folder("heavy.inner") == folder
    assert find_folder("heavy.missing") is None
    assert find_folder("missing.inner") is None
    assert find_folder("sys.path") is None
    assert "heavy" not in sys.modules


def test_a_checkout_of_megatron_wins_over_the_wheel_and_says_so(tmp_path, monkeypatch):
    core = put_package(tmp_path, "megatron.core", numbers=(0, 18, 1), pre_release="rc2")
    monkeypatch.syspath_prepend(tmp_path)
    package = find_package("megatron-core")
    assert (package.version, package.path, package.checkout) == ("0.18.1rc2", str(core), True)
    problem = unmet_version("megatron-core", ">=0.19,<0.21")
    assert f"got 0.18.1rc2 from the source checkout {core}. Check out a version" in problem


@pytest.mark.parametrize("source", [None, "VERSION = (0, 19)\n"])
def test_a_megatron_that_does_not_say_its_version_is_believed(tmp_path, monkeypatch, source):
    core = put_package(tmp_path, "megatron.core")
    if source:
        (core / "package_info.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    assert find_package("megatron-core").version == "unknown"
    assert unmet_version("megatron-core", ">=0.19,<0.21") is None


VERSIONS = {  # installed, wanted -> fits
    "equal": ("2.11.0", ">=2.11", True),
    "older": ("2.10.1", ">=2.11", False),
    "newer than the range": ("0.21.0", ">=0.19,<0.21", False),
    "local build": ("2.11.0+cu130", ">=2.11", True),
    "container pre-release": ("2.11.0a0+ecf3bae", ">=2.11", True),
    "pre-release of something older": ("2.10.0a0+ecf3bae", ">=2.11", False),
    "pinned to a series": ("2.20.2", "==2.20.*", True),
}


@pytest.mark.parametrize(("installed", "wanted", "fits"), VERSIONS.values(), ids=VERSIONS.keys())
def test_versions_are_compared_as_releases(monkeypatch, installed, wanted, fits):
    """NVIDIA's containers ship pre-releases that already have what the release will have."""
    monkeypatch.setattr(environment.importlib.metadata, "version", lambda name: installed)
    problem = unmet_version("torch", wanted)
    assert problem is None if fits else problem.startswith(f"torch: expected {wanted}, got ")
