"""The doctor names what is here, what is wrong, and the line that mends it."""

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import megatron.core  # noqa: F401 before doctor imports it, with nothing compiled
import pytest

from moe_optim import environment
from moe_optim.commands.cli import doctor
from moe_optim.commands.cli.main import main
from moe_optim.environment import Gpu

ROOT = Path(__file__).parents[3]

KEYS = {"ok", "problems", "moe_optim", "packages", "gpus", "native_gemms", "patches"}
PACKAGES = {"python", "torch", "megatron-core", "transformer-engine", "apex", "triton", "pybind11"}
PACKAGES |= {"emerging-optimizers"}
PACKAGE_KEYS = {"version", "path", "checkout", "needed", "state", "note", "problem"}
PATCH_KEYS = {"id", "state", "target", "because", "remove_when"}
H100 = Gpu(name="NVIDIA H100", sm=90, memory_gib=79.6)


def fake_package(folder, module, source="", version=None):
    """Write an importable package; ``version`` makes it a Megatron core of that version."""
    package = folder.joinpath(*module.split("."))
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(source)
    if version:
        numbers = zip(("MAJOR", "MINOR", "PATCH"), version.split("."), strict=True)
        (package / "package_info.py").write_text("".join(f"{k} = {v}\n" for k, v in numbers))
    return package


@pytest.fixture(autouse=True)
def forget_fakes():
    """What a test imports from its own folder is not found by the next one."""
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "apex"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def report():
    """What the program says in this environment, from a process of its own."""
    command = [sys.executable, "-m", "moe_optim.commands.cli.main", "doctor", "--json"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return json.loads(result.stdout) | {"exit code": result.returncode}


@pytest.fixture
def light(monkeypatch):
    """Examine without importing what is found."""
    monkeypatch.setattr(doctor, "_failure", lambda name: None)
    monkeypatch.setattr(doctor, "_examine_patches", list)
    monkeypatch.setattr(doctor, "find_gpus", lambda: ())
    return monkeypatch


def hide(monkeypatch, *modules):
    found = environment.find_folder
    monkeypatch.setattr(
        environment, "find_folder", lambda module: None if module in modules else found(module)
    )


def test_a_working_environment_is_healthy_and_the_keys_are_frozen(report):
    """Transformer Engine and apex may be absent; no patch may have lost its target."""
    assert set(report) == KEYS | {"exit code"}
    assert set(report["moe_optim"]) == {"version", "path", "enabled"}
    assert set(report["packages"]) == PACKAGES
    assert all(set(package) == PACKAGE_KEYS for package in report["packages"].values())
    assert report["problems"] == []
    assert (report["ok"], report["exit code"]) == (True, 0)
    assert report["packages"]["torch"]["state"] == "ok"
    assert report["packages"]["megatron-core"]["note"] == "the installed wheel"
    assert report["packages"]["transformer-engine"]["state"] in ("ok", "absent")
    assert report["patches"] and all(set(patch) == PATCH_KEYS for patch in report["patches"])
    assert {patch["state"] for patch in report["patches"]} <= {"off", "not needed"}


def test_a_missing_megatron_is_an_error_with_the_line_that_installs_it(light, capsys):
    hide(light, "megatron.core")
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    (problem,) = report["problems"]
    assert problem == (
        "megatron-core: expected >=0.19,<0.21, got none. pip install 'moe_optim[megatron]'"
    )
    assert report["packages"]["megatron-core"]["state"] == "missing"
    assert report["patches"] == []


def test_a_checkout_of_another_version_wins_and_is_an_error(light, tmp_path):
    version = "0.21.0"
    core = fake_package(tmp_path, "megatron.core", version=version)
    light.syspath_prepend(tmp_path)
    report = doctor.examine()
    megatron = report["packages"]["megatron-core"]
    assert (megatron["state"], megatron["path"], megatron["checkout"]) == ("unfit", str(core), True)
    installed = importlib.metadata.version("megatron-core")
    assert megatron["note"] == f"a source checkout, which overrides the wheel {installed}"
    assert f"got {version} from the source checkout {core}." in report["problems"][0]


def test_the_unrelated_apex_is_not_taken_for_nvidias(light, tmp_path):
    folder = fake_package(tmp_path, "apex", source="raise ImportError('no pyramid')")
    light.syspath_prepend(tmp_path)
    apex = doctor.examine()["packages"]["apex"]
    assert (apex["state"], apex["problem"]) == ("absent", None)
    assert apex["note"].startswith(f"{folder} is the unrelated apex")


def test_the_screen_leads_with_what_this_machine_can_do_and_lists_patches_on_request(light, capsys):
    patch = dict.fromkeys(PATCH_KEYS, "x") | {"id": "the-patch", "state": "off"}
    light.setattr(doctor, "_examine_patches", lambda: [patch])
    assert main(["doctor"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("moe_optim ")
    starts = ("Trains on: the CPU", "Portable experts: ", "Transformer Engine's own GEMMs: ")
    starts += ("Scripts: ", "Patches of megatron-core: all 1 fit (--patches lists them)")
    for line, start in zip(lines, starts, strict=False):
        assert line.startswith(start)
    assert "the-patch" not in "".join(lines)
    light.setattr(doctor, "find_gpus", lambda: (H100,))
    assert main(["doctor", "--patches"]) == 0
    screen = capsys.readouterr().out
    assert "the-patch" in screen and "Trains on: NVIDIA H100 (sm 90, 79.6 GiB)" in screen
    patch["state"] = "broken: it now takes (a, b)"
    assert main(["doctor"]) == 1
    assert "error: patch the-patch: broken: it now takes (a, b)." in capsys.readouterr().out
