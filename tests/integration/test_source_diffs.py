"""The source diffs stand for the same table as `install()`, patch by patch."""

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
import types
from functools import cache
from pathlib import Path

import pytest
import torch

from moe_optim.config import MoEOptimConfig
from moe_optim.environment import find_folder
from moe_optim.errors import StateError
from moe_optim.integration import patches
from moe_optim.integration.installation import installed_config
from moe_optim.integration.patched_tree import HOOK, replacement_of, switch_on
from moe_optim.integration.source_diffs import apply_diffs, load_diffs
from tests.support.ranks import run_ranks
from tests.support.training import assert_same_run, pretrain
from tests.support.training_runs.scripts import PRETRAIN, copy_diffed_files, needs_diffed_files

pytest.importorskip("megatron.core")

ROOT = Path(__file__).parents[2]
DIFFS = load_diffs()
REBOUND = {patch.id: patch for patch in (*patches.EXPERTS, *patches.OPTIMIZER)}
"""What `install()` rebinds on any machine; the rest is rebound by the part that needs it."""

WITHOUT_STOCK = {"local-experts", "shared-memory-flag"}
"""Where a diff asks only whether there is a replacement, in the middle of what it replaces."""


@cache
def patched_source(diff):
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_diffed_files(Path(folder) / "tree")
        apply_diffs(tree, [diff])
        return (tree / diff.path).read_text()


def module_of(diff):
    return diff.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def asked_for(diff):
    """Return patch id and stock object, as text, of every call of `replaceable` in a file."""
    tree = ast.parse(patched_source(diff))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {
        (call.args[0].value, ast.unparse(call.args[1]))
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id == "replaceable"
    }


def test_every_patch_that_install_applies_has_its_diff_and_no_diff_names_another():
    assert {id for diff in DIFFS for id in diff.patch_ids} == set(REBOUND)


@needs_diffed_files
def test_a_diff_replaces_what_the_patch_targets_where_the_patch_targets_it():
    """In the module of the target; the object handed over is the target, and what is called goes
    through `replaceable`. The replacement is that of the table."""
    for patch in REBOUND.values():
        module, _, target = patch.target.partition(":")
        (diff,) = [d for d in DIFFS if module_of(d) == module and patch.id in d.patch_ids]
        stock = {stock for id, stock in asked_for(diff) if id == patch.id}
        assert stock == ({"None"} if patch.id in WITHOUT_STOCK else {target}), patch.id
        found = replacement_of(patch.id)
        module, _, name = patch.replacement.partition(":")
        assert (found.__module__, found.__qualname__) == (module, name)
    for diff in DIFFS:
        stocks = {stock for _, stock in asked_for(diff)} - {"None"}
        calls = ast.walk(ast.parse(patched_source(diff)))
        called = {ast.unparse(node.func) for node in calls if isinstance(node, ast.Call)}
        assert not called & stocks, diff.path


def test_without_the_flag_the_hook_hands_back_what_it_was_given():
    """It is plain Python that imports nothing of this package."""
    (diff,) = [diff for diff in DIFFS if module_of(diff) == HOOK]
    hook = types.ModuleType(HOOK)
    exec(patched_source(diff), vars(hook))
    stock = object()
    assert hook.replaceable("bucket-group", stock) is stock
    hook.replacement_of = {"bucket-group": "ours"}.get
    assert hook.replaceable("bucket-group", stock) == "ours"


def switch_on_in_rank():
    """Do what a patched tree does with its arguments; return what it then gets, and a refusal."""
    hook = types.ModuleType(HOOK)
    (diff,) = [diff for diff in DIFFS if module_of(diff) == HOOK]
    exec(patched_source(diff), vars(hook))
    sys.modules[HOOK] = hook
    parser = switch_on(argparse.ArgumentParser(), PLUGIN)
    args = parser.parse_args(PLUGIN)
    assert args.use_moe_grouped_optim and args.moe_optim_set == ["format=mxfp8"]
    assert installed_config() == MoEOptimConfig(format="mxfp8")
    switch_on(argparse.ArgumentParser(), PLUGIN)  # Megatron may parse more than once
    got = hook.replaceable("distributed-optimizer", None).__qualname__
    try:
        switch_on(argparse.ArgumentParser(), PLUGIN[:1] + ["--moe-optim-set", "format=nvfp4"])
    except StateError as error:
        return got, str(error)


def test_the_flag_configures_a_patched_tree_once():
    """Another configuration than one that is installed already is refused."""
    ((got, refusal),) = run_ranks(1, switch_on_in_rank)
    assert got == "GroupedDistributedOptimizer"
    assert refusal.startswith("--use-moe-grouped-optim: expected the configuration that is insta")


PLUGIN = ["--use-moe-grouped-optim", "--moe-optim-set", "format=mxfp8"]
FLAGS = [*PLUGIN, "--train-iters", "2", "--eval-interval", "2", "--optimizer", "muon"]
CLASSES = {"GroupedDistributedOptimizer", "MuonDistributedOptimizer"}

TRAIN_IN_TREE = """
import runpy, sys, torch
import moe_optim.commands.train.pretrain as entry
from moe_optim.integration.patches import PATCHES
from moe_optim.integration.engine import patch_state
from tests.support.training import pretrain

script, result, *flags = sys.argv[1:]

def run(argv):  # what python does, and nothing of this package
    sys.argv = [script, *argv, "--distributed-backend", "gloo"]
    runpy.run_path(script, run_name="__main__")

entry.train = run
record = pretrain(flags, None)
import megatron.core
applied = {patch.id for patch in PATCHES if patch_state(patch) == "applied"}
torch.save((record, applied, megatron.core.__file__), result)
"""


def train_in_rank(flags):
    return pretrain(flags, None)


@needs_diffed_files
@pytest.mark.extended
def test_a_patched_tree_trains_as_the_plugin_does_and_nothing_is_rebound(tmp_path):
    """Losses, masters, moments, weights and classes are those of `install()`, to the bit."""
    tree, script, result = (tmp_path / name for name in ("tree", "script.py", "result.pt"))
    ignored = shutil.ignore_patterns("__pycache__")
    for package in ("core", "training"):
        folder = find_folder(f"megatron.{package}")
        shutil.copytree(folder, tree / "megatron" / package, ignore=ignored)
    apply_diffs(tree, DIFFS)
    script.write_text(PRETRAIN)
    subprocess.run(
        [sys.executable, "-c", TRAIN_IN_TREE, script, result, *FLAGS],
        env=os.environ
        | {"PYTHONPATH": f"{tree}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
        | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "TORCHDYNAMO_DISABLE": "1"},
        check=True,
    )
    got, applied, origin = torch.load(result, weights_only=False)
    assert Path(origin).is_relative_to(tree)
    assert not applied & set(REBOUND)
    (want,) = run_ranks(1, train_in_rank, FLAGS)
    assert_same_run(got, want, what="patched tree against install()")
    assert got.classes == want.classes == CLASSES
