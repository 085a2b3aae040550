"""The source diffs stand for the same table as `install()`, patch by patch."""

import ast
import types
from pathlib import Path

import pytest

from moe_optim.environment import find_folder
from moe_optim.megatron import patches
from moe_optim.megatron.source_diffs import load_diffs
from moe_optim.megatron.source_hook import HOOK, replacement_of

pytest.importorskip("megatron.core")

ROOT = Path(__file__).parents[2]
DIFFS = load_diffs()
REBOUND = {patch.id: patch for patch in (*patches.EXPERTS, *patches.OPTIMIZER)}
"""What `install()` rebinds on any machine; the rest is rebound by the part that needs it."""


def patched_source(diff):
    core = find_folder("megatron.core")
    source = (core.parents[1] / diff.path).read_bytes() if diff.before else None
    return diff.content_after(source).decode()


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


@pytest.mark.parametrize("patch", REBOUND.values(), ids=lambda patch: patch.id)
def test_a_diff_replaces_what_the_patch_targets_where_the_patch_targets_it(patch):
    """In the module of the target, and the object handed over is the target."""
    module, _, target = patch.target.partition(":")
    (diff,) = [diff for diff in DIFFS if module_of(diff) == module and patch.id in diff.patch_ids]
    stock = {stock for id, stock in asked_for(diff) if id == patch.id}
    assert stock == ({"None"} if patch.id == "local-experts" else {target})


@pytest.mark.parametrize("diff", DIFFS, ids=lambda diff: diff.path)
def test_no_use_of_a_replaced_name_is_left_out(diff):
    """A name is used as often as it is replaced: what is called goes through `replaceable`."""
    stocks = {stock for _, stock in asked_for(diff)} - {"None"}
    called = {
        ast.unparse(node.func)
        for node in ast.walk(ast.parse(patched_source(diff)))
        if isinstance(node, ast.Call)
    }
    assert not called & stocks


@pytest.mark.parametrize("diff", DIFFS, ids=lambda diff: diff.path)
def test_a_diff_adds_lines_of_python_no_longer_than_megatrons(diff):
    added = {line for _, after in diff.hunks for line in after.lines}
    assert all(len(line) <= 101 for line in added)
    compile(patched_source(diff), diff.path, "exec")


@pytest.mark.parametrize("patch", REBOUND.values(), ids=lambda patch: patch.id)
def test_the_replacement_is_that_of_the_table(patch):
    found = replacement_of(patch.id)
    module, _, name = patch.replacement.partition(":")
    assert (found.__module__, found.__qualname__) == (module, name)


def test_without_the_flag_the_hook_hands_back_what_it_was_given():
    """It is plain Python that imports nothing of this package."""
    (diff,) = [diff for diff in DIFFS if module_of(diff) == HOOK]
    hook = types.ModuleType(HOOK)
    exec(patched_source(diff), vars(hook))
    stock = object()
    assert hook.replaceable("bucket-group", stock) is stock
    hook.replacement_of = {"bucket-group": "ours"}.get
    assert hook.replaceable("bucket-group", stock) == "ours"


def test_the_package_carries_the_diffs():
    """What lies in `patches/` is what an installed package reads."""
    shipped = (ROOT / "moe_optim" / "megatron" / "megatron-lm-0.19").glob("*.patch")
    listed = (ROOT / "patches" / "megatron-lm-0.19").glob("*.patch")
    assert {p.name: p.read_text() for p in shipped} == {p.name: p.read_text() for p in listed}
    assert "megatron/megatron-lm-0.19/*.patch" in (ROOT / "pyproject.toml").read_text()
