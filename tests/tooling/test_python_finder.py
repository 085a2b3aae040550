"""`make` finds a Python that is new enough, or says once what it found and what to do."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ("make", "sh", "rm", "touch")

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


@pytest.fixture
def machine(tmp_path):
    """A machine with nothing on PATH but make, and a checkout with a Makefile."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    for folder in ("bin", "home"):
        (tmp_path / folder).mkdir()
    for tool in TOOLS:
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool))
    return tmp_path


def put_python(path, answer, status=0):
    """Put a program at ``path`` that answers like a Python, whatever it is asked."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{answer}'\nexit {status}\n")
    path.chmod(0o755)
    return str(path)


def make(machine, *arguments, **environment):
    home = str(machine / "home")
    return subprocess.run(
        ["make", *arguments],
        cwd=machine,
        env={"PATH": str(machine / "bin"), "HOME": home} | environment,
        capture_output=True,
        text=True,
    )


def found(machine, *arguments, **environment):
    result = make(machine, "-s", "python", *arguments, **environment)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_a_shim_without_a_version_behind_it_is_passed_over(machine):
    assert found(machine, f"PYTHON={sys.executable}") == sys.executable
    put_python(machine / "bin" / "python3.12", "pyenv: python3.12: command not found", status=127)
    put_python(machine / "bin" / "python3", "3.11.7")
    real = put_python(machine / "home/.pyenv/versions/3.12.1/bin/python3", "ok")
    assert found(machine) == real


def test_without_a_new_python_one_message_says_everything(machine):
    shim = put_python(machine / "bin" / "python3.12", "pyenv: not found", status=127)
    old = put_python(machine / "bin" / "python3", "3.11.7")
    bare = put_python(machine / "bin" / "python", "3.12.3, but without the venv module")
    result = make(machine, "train")
    assert result.returncode != 0
    assert result.stderr.startswith(
        "error: moe_optim needs Python 3.12 or newer, with its venv module. Found:\n"
        f"  {shim}: does not run\n"
        f"  {old}: 3.11.7\n"
        f"  {bare}: 3.12.3, but without the venv module\n"
        "Install one, or name one: make train PYTHON=/path/to/python3.12\n"
    )
    assert result.stderr.count("error:") == 1
    assert result.stdout == ""
    assert not (machine / ".venv").exists()


def test_an_environment_is_set_up_once_and_the_tools_of_developers_are_added_later(machine):
    """The stand-in answers every question and installs nothing, which is all make sees."""
    put_python(machine / ".venv/bin/python", "")
    put_python(machine / ".venv/bin/moe-optim", "trained")
    to_train = make(machine, "train").stdout
    assert "Installing moe_optim" in to_train and "trained" in to_train
    assert "development tools" not in to_train
    to_develop = make(machine, ".venv/.installed").stdout
    assert "development tools" in to_develop and "Installing moe_optim" not in to_develop
    assert "Installing" not in make(machine, ".venv/.installed").stdout
    os.utime(machine / ".venv/.installed-to-train", (0, 0))
    assert "Installing moe_optim" in make(machine, ".venv/.installed").stdout
