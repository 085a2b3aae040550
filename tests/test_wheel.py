"""The wheel alone, in an environment of its own and a folder of its own, trains the quickstart.

What it depends on is borrowed from the environment of the tests, without the checkout; nothing is
downloaded.
"""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")
pytest.importorskip("pip")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "moe_optim", "recipes", "patches")
CONTAINERS_TORCH = "2.11.0a0+0f1d3bb5a1.nv26.02"
TRAIN_SHORTLY = """
{command} train quickstart --ranks 1 --cpu --text {text} -- --train-iters 3 --eval-interval 3
--eval-iters 1 --seq-length 64 --lr-warmup-iters 0 --save-interval 3 --global-batch-size 8
"""
PIP = ("-m", "pip", "--disable-pip-version-check", "--quiet")


def call(*command, cwd="/"):
    """Run a command that knows nothing of the checkout, and return what it prints."""
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "TORCHDYNAMO_DISABLE")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build the wheel, of a copy: building leaves files behind."""
    sources, out = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, sources / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy2(ROOT / name, sources / name)
    options = ("--no-deps", "--no-index", "--no-build-isolation")
    call(sys.executable, *PIP, "wheel", *options, "--wheel-dir", out, sources)
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """Install it into a fresh environment that holds all it needs, torch as in a container."""
    root = tmp_path_factory.mktemp("environment")
    call(sys.executable, "-m", "venv", "--without-pip", root)
    python = root / "bin" / "python"
    site = Path(
        call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    )
    (site / "borrowed.pth").write_text(f"{borrowed_packages(root / 'borrowed')}\n")
    metadata = site / f"torch-{CONTAINERS_TORCH}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Name: torch\nVersion: {CONTAINERS_TORCH}\n")
    entry_points = distribution("torch").read_text("entry_points.txt") or ""
    (metadata / "entry_points.txt").write_text(entry_points)  # torch 2.15 finds its backends there
    call(sys.executable, *PIP, "--python", python, "install", "--no-index", wheel)
    return root


def borrowed_packages(folder):
    """Return a folder of links to all installed packages but this one, and but torch's metadata."""
    folder.mkdir()
    for place in map(Path, sys.path):
        if place.name not in ("site-packages", "dist-packages"):
            continue
        for entry in place.iterdir():
            left_out = entry.name.startswith(("moe_optim", "__editable__", "torch-"))
            if not left_out and not (folder / entry.name).exists():
                (folder / entry.name).symlink_to(entry)
    return folder


def test_the_wheel_holds_what_the_package_reads(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    recipes = {
        f"moe_optim/config/recipe_files/{path.name}" for path in (ROOT / "recipes").glob("*.yaml")
    }
    diffs = (ROOT / "patches" / "megatron-lm-0.19").glob("*.patch")
    folder = "moe_optim/integration/megatron-lm-0.19"
    assert recipes | {f"{folder}/{path.name}" for path in diffs} <= names
    assert "moe_optim/py.typed" in names
    assert not [
        name
        for name in names
        if name.startswith(("tests/", "tools/", "recipes/", "patches/", "benchmarks/"))
    ]


def test_an_installation_leaves_the_torch_of_a_container_alone(environment):
    """pip found every requirement met, with no index to take another from."""
    code = "import importlib.metadata as m; print(m.version('torch'), m.version('moe_optim'))"
    torch, _ = call(environment / "bin" / "python", "-c", code).split()
    assert torch == CONTAINERS_TORCH


@pytest.mark.extended
def test_the_installed_command_trains_the_quickstart_anywhere(environment, tmp_path):
    command, text = environment / "bin" / "moe-optim", tmp_path / "text"
    shutil.copytree(ROOT / "moe_optim" / "commands" / "train", text)
    place = call(
        environment / "bin" / "python", "-c", "import moe_optim; print(moe_optim.__file__)"
    ).strip()
    assert Path(place).is_relative_to(environment)
    work = tmp_path / "work"
    work.mkdir()
    assert "\nquickstart " in call(command, "recipes", cwd=work)
    said = call(*TRAIN_SHORTLY.format(command=command, text=text).split(), cwd=work)
    assert f"{environment}" in said.splitlines()[0]  # the recipe that was read
    summary = json.loads((work / "runs" / "quickstart" / "summary.json").read_text())
    assert summary["optimizer"] == "GroupedDistributedOptimizer"
    assert summary["iterations"] == 3
    assert summary["loss_last"] < summary["loss_first"]
    assert {path.name for path in work.iterdir()} == {"runs"}
