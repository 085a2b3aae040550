"""Muon in Megatron's arguments: with the plug-in it is a distributed optimizer, as Adam is."""

import contextlib
import io
import os
import sys
import tempfile
import types
from argparse import Namespace
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, Literal

import pytest

from moe_optim.errors import MoEOptimError
from tests.support.ranks import on_ranks, run_ranks
from tests.support.training import MODEL, OVERLAP
from tests.support.training_runs.scripts import copy_diffed_files, needs_diffed_files

pytest.importorskip("megatron.core")

PLUGIN = ["--use-moe-grouped-optim", "--moe-optim-set", "format=mxfp8"]
ALONE = [word for word in MODEL if word != "--use-distributed-optimizer"]
RUN = ["--train-iters", "2", "--eval-interval", "2"]
GIVEN = {  # flags of a run
    "without it": ALONE,
    "with overlap": [*MODEL, *OVERLAP],
    "fully reshardable": [*MODEL, "--dist-ckpt-optim-fully-reshardable"],
    "files of ranks": [*MODEL, "--ckpt-format", "torch"],
    "without gloo": [*MODEL, "--disable-gloo-process-groups"],
    "frozen": [*MODEL, "--freeze-all-layers"],
}
SCRIPT = """
from megatron.training.arguments import parse_and_validate_args
args = parse_and_validate_args()
"""


def _begin_anew() -> None:
    """Forget what this process has installed, and Megatron its arguments."""
    from megatron.training.global_vars import unset_global_variables

    from moe_optim.integration import installation

    installation.uninstall()
    unset_global_variables()


def _run_script(script: Path, argv: list[str]) -> Namespace:
    """Return the arguments of a script that `moe-optim run` runs."""
    from moe_optim.integration.script_runner import run_script

    run_script(script, argv, cpu=True)
    return sys.modules["__main__"].args  # type: ignore[no-any-return]


def _run_patched_tree(_script: Path, argv: list[str]) -> Namespace:
    """Return the arguments of Megatron's own code with the source diffs in it."""
    from moe_optim.integration import cpu_runtime
    from moe_optim.integration.patched_tree import HOOK
    from moe_optim.integration.source_diffs import apply_diffs, load_diffs

    cpu_runtime.install()
    name = "megatron.training.arguments"
    tree = copy_diffed_files(Path(tempfile.mkdtemp(dir=_script.parent)) / "tree")
    apply_diffs(tree, load_diffs())
    for module in (HOOK, name):
        path = tree / f"{module.replace('.', '/')}.py"
        sys.modules[module] = types.ModuleType(module)
        exec(compile(path.read_bytes(), path, "exec"), vars(sys.modules[module]))
    sys.argv = ["script", *argv]
    return sys.modules[name].parse_and_validate_args()  # type: ignore[no-any-return]


HOOKS = {"run": _run_script, "patched tree": _run_patched_tree}


def _settle(
    hook: str, script: Path, cases: Sequence[str], optimizers: Sequence[str]
) -> dict[tuple[str, str], dict[str, Any]]:
    """Return what arguments, configurations and installation become, by case and optimizer."""
    from megatron.training.training import (
        get_megatron_ddp_config,
        get_megatron_optimizer_config,
    )

    from moe_optim.integration import installation

    found = {}
    for given, optimizer in product(cases, optimizers):
        _begin_anew()
        args = HOOKS[hook](script, [*GIVEN[given], *RUN, *PLUGIN, "--optimizer", optimizer])
        config, _ = get_megatron_optimizer_config(args)
        ddp = get_megatron_ddp_config(args)
        found[given, optimizer] = {
            "arguments": {name: str(value) for name, value in vars(args).items()},
            "distributed": (config.use_distributed_optimizer, ddp.use_distributed_optimizer),
            "layer-wise": config.use_layer_wise_distributed_optimizer,
            "installed": (config.optimizer, installation.installed_optimizer()),
        }
    return found


@pytest.fixture(scope="module")
def script(tmp_path_factory) -> Path:
    path: Path = tmp_path_factory.mktemp("script") / "pretrain_mine.py"
    path.write_text(SCRIPT)
    return path


def assert_same_but_for_the_name(adam: dict[str, Any], muon: dict[str, Any], frozen: bool) -> None:
    ours, theirs = muon["arguments"], adam["arguments"]
    differing = {key for key in ours | theirs if ours.get(key) != theirs.get(key)}
    assert differing == {"optimizer"} and ours["optimizer"] == "muon"
    assert muon["distributed"] == adam["distributed"] == (not frozen,) * 2
    assert muon["layer-wise"] is False
    assert (muon["installed"], adam["installed"]) == (("muon", "muon"), ("adam", "adam"))


@pytest.mark.parametrize(
    ("hook", "cases"),
    [
        ("run", list(GIVEN)),
        pytest.param("patched tree", ["without it", "frozen"], marks=needs_diffed_files),
    ],
)
def test_arguments_of_muon_are_those_of_adam_but_for_the_name(script, hook, cases):
    """All of them, so that buffers and checkpoints take the same ways; also its deprecated name."""
    (found,) = run_ranks(1, _settle, hook, script, cases, ("adam", "muon", "dist_muon"))
    for given, name in product(cases, ("muon", "dist_muon")):
        assert_same_but_for_the_name(found[given, "adam"], found[given, name], given == "frozen")


WITHOUT_GLOO = [*MODEL, "--disable-gloo-process-groups"]
TOLD: dict[str, tuple[list[str], Literal["adam", "muon"] | None, str]] = {
    # flags, optimizer of install() -> what is told
    "states on the host": (
        [*MODEL, "--moe-optim-set", "offload_states=0.5"],
        None,
        "ConfigError: moe_optim: offload_states: 0.5 with Muon: batches of whole matrices need th",
    ),
    "files of ranks without gloo": (
        [*WITHOUT_GLOO, "--ckpt-format", "torch"],
        None,
        "ConfigError: --disable-gloo-process-groups: expected --ckpt-format torch_dist",
    ),
    "installed for Adam": (
        MODEL,
        "adam",
        "StateError: --optimizer: expected the optimizer that is installed, adam, got muon. Call "
        'moe_optim.install(config, optimizer="muon")',
    ),
    "a flag without effect": (
        [*MODEL, "--no-use-layer-wise-param-layout"],
        None,
        "moe_optim: --no-use-layer-wise-param-layout: ",
    ),
}


@on_ranks(1)
def test_what_megatron_checks_for_a_distributed_optimizer_alone_is_checked(script):
    """Its validation takes Muon for another optimizer, and skips these. What Muon does not support
    is refused, too, before a model is built, and what has no effect is remarked on."""
    from moe_optim.config import MoEOptimConfig
    from moe_optim.integration import installation

    told = {}
    for name, (flags, first, _) in TOLD.items():
        _begin_anew()
        if first is not None:
            installation.install(MoEOptimConfig(format="mxfp8"), optimizer=first)
        with contextlib.redirect_stderr(io.StringIO()) as said:
            try:
                _run_script(script, [*flags, *RUN, *PLUGIN, "--optimizer", "muon"])
                told[name] = said.getvalue()
            except MoEOptimError as error:
                told[name] = f"{type(error).__name__}: {error}"
    for name, (_, _, beginning) in TOLD.items():
        lines = [line for line in told[name].splitlines() if "moe_optim" in line or "Error" in line]
        if beginning:
            assert told[name].count(beginning) == 1 and lines[-1].startswith(beginning), name
        else:
            assert lines == [], name


def _train_without_hooks(format: str) -> str:
    """Return the refusal where a script installs the plug-in, and Megatron validates alone."""
    from moe_optim.commands.train import pretrain
    from moe_optim.config import MoEOptimConfig
    from moe_optim.integration import cpu_runtime
    from moe_optim.integration.installation import install

    cpu_runtime.install()
    os.environ["MOE_OPTIM_CPU"] = "1"
    install(MoEOptimConfig(format=format), optimizer="muon")  # type: ignore[arg-type]
    try:
        pretrain.train([*MODEL, *RUN, "--optimizer", "muon"])
    except MoEOptimError as error:
        return f"{type(error).__name__}: {error}"
    return ""


LEFT_ON = {  # where: quantized weights cannot be wrapped without a distributed optimizer
    "mxfp8": "Megatron's validation clears it for Muon, and so do recipes of Megatron-Bridge: set "
    "use_distributed_optimizer and clear use_layer_wise_distributed_optimizer before the model is "
    "wrapped, in validated arguments, or in the configurations of DDP and the optimizer, as "
    "--use-moe-grouped-optim and MoEOptimizerConfig do, or",
    "bf16": "\n  use_layer_wise_distributed_optimizer: Megatron's layer-wise optimizer has its own "
    "buffers, shards and checkpoints. Clear it and set use_distributed_optimizer once Megatron has",
}


@pytest.mark.parametrize("format", LEFT_ON)
def test_a_layer_wise_optimizer_that_a_script_leaves_on_is_refused_by_name(format):
    (told,) = run_ranks(1, _train_without_hooks, format)
    assert told.startswith("ConfigError: moe_optim: expected ") and LEFT_ON[format] in told
