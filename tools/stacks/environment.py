"""Runs a stack's opt-in tests: unpacks its source, installs what it imports, sets variables."""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import distributions, files
from pathlib import Path
from xml.etree import ElementTree

TESTS: Mapping[str, tuple[str, ...]] = {
    "slime": ("test_actors.py", "test_launchers.py"),
    "miles": ("test_actors.py", "test_launchers.py"),
    "verl": ("test_verl.py", "test_verl_engine.py"),
    "nemo_rl": ("test_nemo_rl.py", "test_nemo_worker.py"),
}
"""Files in ``tests/upstream`` by stack."""
PACKAGES = (
    "accelerate==1.15.0", "antlr4-python3-runtime==4.9.3", "cloudpickle==3.1.3",
    "datasets==5.2.0", "defusedxml==0.7.1", "dill==0.4.1", "httpx==0.28.1", "hydra-core==1.3.8",
    "megatron-bridge==0.6.2", "msgspec==0.22.0", "multiprocess==0.70.19",
    "nvidia-modelopt==0.47.0", "orjson==3.13.0", "pandas==3.1.1", "peft==0.21.2", "pulp==4.2.0",
    "pyarrow==26.0.1", "pyvers==0.2.3", "tensordict==0.15.3", "torchdata==0.11.0", "xxhash==4.1.0",
)  # fmt: skip
"""What verl and NeMo-RL import beside the development environment and stand-ins."""
RESILIENCY = "nvidia-resiliency-ext==0.6.0"
"""The oldest that Megatron's main accepts. pip skips its wheel on systems with an older C library
than 2.39, which its profiler alone needs."""
ROOT = Path(__file__).parents[2]


def unpack(source: Path, folder: Path, *parts: str) -> Path:
    """Return a folder with the files of a project.

    Args:
        source: work tree, returned as is, or repository without one.
        folder: target of the files of a repository's newest commit.
        parts: folders of the repository to unpack; none for all.
    """
    if not (source / "HEAD").is_file():
        return source
    folder.mkdir(parents=True, exist_ok=True)
    archive = subprocess.run(
        ["git", "-C", source, "archive", "HEAD", *parts], check=True, stdout=subprocess.PIPE
    )
    subprocess.run(["tar", "-x", "-C", folder], check=True, input=archive.stdout)
    return folder


def unpack_megatron(source: Path, folder: Path) -> Path:
    """Return a folder with Megatron's files.

    A work tree is returned as is, in which Megatron compiles its dataset helper for the Python of
    ``python3-config``. In others the helper of the installed megatron-core takes its place.
    """
    tree = unpack(source, folder, "megatron")
    if tree != source:
        (tree / "megatron/core/datasets/Makefile").unlink()
        for file in files("megatron-core") or ():
            if file.name.startswith("helpers_cpp."):
                shutil.copy(file.locate(), tree / file)
    return tree


def install_packages(folder: Path) -> None:
    """Install :data:`PACKAGES` without their dependencies, unless the folder has them.

    Raises:
        ValueError: the folder has other files, such as packages of other versions.
    """
    found = distributions(path=[str(folder)])
    names = {f"{one.name.lower().replace('_', '-')}=={one.version}" for one in found}
    missing = sorted({*PACKAGES, RESILIENCY} - names)
    if not missing:
        return
    if folder.is_dir() and any(folder.iterdir()):
        raise ValueError(
            f"{folder}: expected {', '.join(missing)}, got a folder with other files. Name another."
        )
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(folder)]
    subprocess.run([*pip, *PACKAGES], check=True)
    system = ["--platform", f"manylinux_2_39_{platform.machine()}", "--only-binary", ":all:"]
    subprocess.run([*pip, *system, RESILIENCY], check=True)


def run_tests(stack: str, source: Path, packages: str | None, megatron: Path | None = None) -> int:
    """Return the exit status of pytest, 1 if all tests are skipped.

    Args:
        stack: key of :data:`TESTS`.
        source: folder with the stack's files.
        packages: folders with Megatron-Bridge and what it imports, separated by colons.
        megatron: folder with Megatron's files; None for the installed megatron-core.
    """
    variables = {f"{stack.upper()}_PATH": str(source), "OMP_NUM_THREADS": "1"}
    if packages:
        variables["MEGATRON_BRIDGE_PATH"] = packages
    if megatron is not None:
        others = os.environ.get("PYTHONPATH")
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(megatron), others]))
    files = [f"tests/upstream/{name}" for name in TESTS[stack]]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        pytest = [sys.executable, "-m", "pytest", "-n", "0", "-rs", f"--junitxml={report}", *files]
        status = subprocess.run(pytest, cwd=ROOT, env=os.environ | variables).returncode
        if status:
            return status
        (suite,) = ElementTree.parse(report).getroot()
    if suite.get("tests") == suite.get("skipped"):
        print(f"{stack}: expected tests that run, got skipped ones only. Check --source {source}.")
        return 1
    return 0
