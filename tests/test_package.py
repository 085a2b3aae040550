"""The package imports anywhere, costs nothing, and offers a fixed set of names."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import moe_optim
from moe_optim.environment import NEEDED

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

PUBLIC = {
    "ConfigError", "Description", "GroupedLinear", "GroupedWeight", "LayoutError", "MoEOptimConfig",
    "MoEOptimError", "MoEOptimizerConfig", "NonFiniteError", "PatchError", "Recipe", "StateError",
    "__version__", "amaxes_from_modelopt", "amaxes_to_modelopt", "calibrate", "calibrated_amax",
    "calibrated_input_amax", "convert_state_dict", "dequantize", "describe", "export_weights",
    "fake_quantize", "get_format", "get_megatron_optimizer", "infer_gemm_partition",
    "infer_partition", "install", "load_recipe", "merge_adapters", "quantize", "quantize_part",
    "set_calibrated_amax", "set_calibrated_input_amax", "synchronize_amax", "uninstall", "use_cpu",
}  # fmt: skip

HEAVY = {"megatron", "transformer_engine", "triton", "torch", "apex"}


LIGHT = """
import sys
import moe_optim
moe_optim.MoEOptimConfig()
moe_optim.load_recipe("recipes/quickstart.yaml")
import moe_optim.commands.cli.main as main
main.build_parser()
print(*{name.partition(".")[0] for name in sys.modules})
"""


def test_imports_stay_light():
    """In a fresh interpreter: a module stays once it was loaded, so the last line tells of all."""
    done = subprocess.run(
        [sys.executable, "-c", LIGHT], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not set(done.stdout.split()) & HEAVY


def test_public_names_are_frozen():
    assert set(moe_optim.__all__) == PUBLIC
    assert set(dir(moe_optim)) == PUBLIC


def test_needed_versions_are_those_of_the_project_file():
    project = PYPROJECT["project"]
    requirements = project["dependencies"] + project["optional-dependencies"]["megatron"]
    assert project["requires-python"] == NEEDED["python"]
    assert f"torch{NEEDED['torch']}.0a0" in requirements
    assert f"megatron-core{NEEDED['megatron-core']}" in requirements


@pytest.mark.parametrize(
    ("torch", "satisfies"),
    [
        ("2.11.0+cu130", True),
        ("2.11.0a0+0f1d3bb5a1.nv26.02", True),
        ("2.10.0", False),
        ("2.10.0a0+b4e4ee81d3.nv25.12", False),
    ],
)
def test_the_pre_releases_of_containers_satisfy_the_requirement_of_torch(torch, satisfies):
    """Else an installation replaces a torch that was built for its container."""
    (requirement,) = [
        found
        for found in map(Requirement, PYPROJECT["project"]["dependencies"])
        if found.name == "torch"
    ]
    assert requirement.specifier.contains(torch) is satisfies
