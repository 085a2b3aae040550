"""The examples do what they say."""

import contextlib
import dataclasses
import importlib.util
import io
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from moe_optim.config import MoEOptimConfig
from moe_optim.integration.arguments import config_from_argv
from tests.support.ranks import run_ranks

pytest.importorskip("megatron.core")

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def run_script(name, ranks, *arguments):
    """Run a script as its first lines say, in processes of their own, and return what it said."""
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [sys.executable, *words, EXAMPLES / name, *arguments],
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout


def _run_main(name, arguments):
    sys.path.insert(0, str(EXAMPLES))
    sys.argv = [name, *map(str, arguments)]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return said.getvalue()


def run_forked(name, ranks, *arguments):
    """Run a script in processes in which Megatron is imported, and return what rank 0 said."""
    return run_ranks(ranks, _run_main, name, arguments)[0]


def check_small_moe(said):
    """The loss falls below a quarter; the run that resumes loses nothing of the one that went on.

    The script itself compares all losses to the bit, and fails if one differs.
    """
    (trained,) = re.findall(r"^trained: loss ([\d.]+) -> ([\d.]+), held out ([\d.]+)$", said, re.M)
    (continued,) = re.findall(r"^continued: loss ([\d.]+) -> ([\d.]+)$", said, re.M)
    (resumed,) = re.findall(r"^resumed: loss ([\d.]+) -> ([\d.]+), held out ([\d.]+)$", said, re.M)
    assert 4 < float(trained[0]) < 5  # of 64 tokens, nothing known: ln 64 is 4.16
    assert float(trained[1]) < float(trained[0]) / 4
    assert resumed == (*continued, trained[2])


@pytest.mark.parametrize("optimizer", ["adam", pytest.param("muon", marks=pytest.mark.extended)])
def test_the_script_trains_saves_and_resumes_on_two_cpu_ranks(tmp_path, optimizer):
    flags = ["--save", tmp_path / "checkpoint", "--optimizer", optimizer]
    check_small_moe(run_forked("train_small_moe.py", 2, *flags))


@pytest.mark.gpu
@pytest.mark.slow
def test_the_script_trains_saves_and_resumes_on_a_gpu(tmp_path):
    check_small_moe(run_script("train_small_moe.py", 1, "--save", tmp_path / "checkpoint"))


def test_an_engine_gets_all_experts_between_rounds_of_training_on_two_cpu_ranks():
    """Layers, experts, linears, and data and scale of each; the model that has been offloaded and
    read goes on learning, and says what comes next."""
    said = run_forked("rollouts.py", 2)
    rounds = re.findall(r"^step (\d+): loss ([\d.]+), engine: (\d+) tensors of experts", said, re.M)
    assert [(int(step), int(count)) for step, _, count in rounds] == [
        (step, 2 * 4 * 2 * 2) for step in (10, 20, 30)
    ]
    losses = [float(loss) for _, loss, _ in rounds]
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] / 4
    assert said.rstrip().endswith(str([3 * token + 1 for token in range(8)]))


# The diff of a launch script with Transformer Engine

PLUGIN = ["--use-moe-grouped-optim", "--moe-optim-set", "format=fp8_block"]


def launched(script, folder):
    """Return the arguments that a launch script gives to torchrun."""
    torchrun = folder / "torchrun"
    torchrun.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    torchrun.chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    command = ["bash", str(script)]
    done = subprocess.run(command, env={"PATH": path}, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.fixture
def scripts(tmp_path):
    """Return the arguments of the script as it is, and after the diff."""
    script = tmp_path / "te_launch.sh"
    shutil.copy2(EXAMPLES / "te_launch.sh", script)
    before = launched(script, tmp_path)
    apply = ["git", "apply", str(EXAMPLES / "te_launch.diff")]
    subprocess.run(
        apply, cwd=tmp_path, check=True, env=os.environ | {"GIT_CEILING_DIRECTORIES": "/"}
    )
    return before, launched(script, tmp_path)


def test_the_diff_starts_the_same_run_under_the_plugin(scripts):
    """Not a flag of Megatron changes, and the flags of the plug-in ask for FP8 blocks."""
    before, after = scripts
    where = before.index("pretrain_gpt.py")
    launcher, flags = before[:where], before[where + 1 :]
    program = ["--no-python", "moe-optim", "run", "pretrain_gpt.py"]
    assert after == [*launcher, *program, *PLUGIN, *flags]
    assert config_from_argv(flags) is None
    assert config_from_argv(after) == MoEOptimConfig(format="fp8_block")


# Megatron-Bridge, whose configurations are stand-ins


def _change_a_configuration(function):
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    from moe_optim.integration.installation import installed_config

    found = importlib.util.spec_from_file_location("example", EXAMPLES / "megatron_bridge.py")
    example = importlib.util.module_from_spec(found)
    found.loader.exec_module(example)

    given = OptimizerConfig(optimizer="adam", bf16=True, lr=3e-4, use_distributed_optimizer=True)
    model = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        num_moe_experts=4,
        moe_layer_freq=[0, 1],
    )
    config = SimpleNamespace(optimizer=given, model=model)
    assert getattr(example, function)(config) is config
    assert installed_config() is None
    config.optimizer.finalize()  # as Megatron-Bridge does before it builds the model
    kept = {field.name: getattr(given, field.name) for field in dataclasses.fields(given)}
    assert {name: getattr(config.optimizer, name) for name in kept} == kept
    make_layers = getattr(model, "transformer_layer_spec", None)
    assert model.moe_grouped_gemm == bool(make_layers)
    layers = make_layers(model, pp_rank=0).layer_specs if make_layers else ()
    parts = [layer.submodules.mlp.keywords["submodules"] for layer in layers]
    kinds = [type(part).__name__ for part in parts]
    return type(config.optimizer).__name__, installed_config(), kinds


@pytest.mark.parametrize(
    ("function", "config", "kinds"),
    [
        ("train_with_moe_optim", MoEOptimConfig(), []),
        (
            "quantize_experts",
            MoEOptimConfig(format="mxfp8_2d", expert_layout="indexed"),
            ["MLPSubmodules", "MoESubmodules"],  # dense layers stay dense
        ),
    ],
)
def test_a_configuration_of_megatron_bridge_keeps_its_settings_and_installs_the_plugin(
    function, config, kinds
):
    """The contract with Megatron-Bridge itself is held by `tests/integration/test_bridge.py`."""
    expected = "MoEOptimizerConfig", config, kinds
    assert run_ranks(1, _change_a_configuration, function) == [expected]


def test_latent_attention_is_refused_with_portable_experts():
    """Before Megatron builds a model, of which it would say that ``k_channels`` is unexpected."""
    found = importlib.util.spec_from_file_location("example", EXAMPLES / "megatron_bridge.py")
    example = importlib.util.module_from_spec(found)
    found.loader.exec_module(example)
    config = SimpleNamespace(model=SimpleNamespace(multi_latent_attention=True))
    with pytest.raises(ValueError, match="multi-latent attention, which it lacks. Call train_with"):
        example.quantize_experts(config)


# slime, miles and verl, of which a stand-in holds the one name that matters

LAUNCHERS = ("slime_and_miles.py", "verl_external_lib.py")


def _install_in_launchers():
    import moe_optim

    found = []
    for name in LAUNCHERS:
        found.append(_install_in_a_launcher(name))
        moe_optim.uninstall()
    return found


def _install_in_a_launcher(name):
    from megatron.core import optimizer

    from moe_optim.integration.installation import installed_config
    from moe_optim.optimizer.factory import get_installed_optimizer

    builder = sys.modules["launcher.model"] = ModuleType("model")
    builder.get_native = optimizer.get_megatron_optimizer
    found = importlib.util.spec_from_file_location("example", EXAMPLES / name)
    example = importlib.util.module_from_spec(found)
    found.loader.exec_module(example)
    if hasattr(example, "install"):
        example.install(None)
    return builder.get_native is get_installed_optimizer, installed_config()


def test_a_launcher_that_builds_its_own_optimizer_builds_ours():
    """What slime, miles and verl themselves make of it: `tests/upstream`."""
    assert run_ranks(1, _install_in_launchers) == [[(True, MoEOptimConfig())] * len(LAUNCHERS)]
