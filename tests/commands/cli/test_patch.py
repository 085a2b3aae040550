"""`moe-optim patch`: all diffs or none, again and again, and back to the byte."""

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from moe_optim.commands.cli import main as cli
from moe_optim.errors import PatchError
from moe_optim.integration.source_diffs import apply_diffs, load_diffs
from tests.support.training_runs.scripts import copy_diffed_files, fingerprint, needs_diffed_files

pytest.importorskip("megatron.core")
pytestmark = needs_diffed_files

DIFFS = load_diffs()
VICTIM = "megatron/core/optimizer/distrib_optimizer.py"


@pytest.fixture
def tree(tmp_path):
    """Return a tree with the files of core_v0.19.0 that the diffs change."""
    return copy_diffed_files(tmp_path / "tree")


def patch(action, tree):
    return cli.main(["patch", action, str(tree)])


def states(tree):
    return {diff.state(tree) for diff in DIFFS}


def said_of_diffs(capsys):
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("megatron/")]
    assert any(line.startswith(f"{VICTIM} (") and "param-layout" in line for line in lines)
    return [line.rpartition(": ")[2] for line in lines]


def test_diffs_are_applied_and_reverted_to_the_byte_and_check_says_of_each(tree, capsys):
    """A second time changes nothing, and nor does check."""
    before = fingerprint(tree)
    assert patch("check", tree) == 1
    assert said_of_diffs(capsys) == ["not applied"] * len(DIFFS)
    assert fingerprint(tree) == before
    assert patch("apply", tree) == 0
    once = fingerprint(tree)
    assert set(once) - set(before) == {"megatron/core/moe_optim_hook.py"}
    capsys.readouterr()
    assert patch("check", tree) == 0
    assert said_of_diffs(capsys) == ["applied"] * len(DIFFS)
    assert patch("apply", tree) == 0
    assert capsys.readouterr().out == "nothing to do\n"
    assert fingerprint(tree) == once
    assert patch("revert", tree) == 0
    capsys.readouterr()
    assert patch("revert", tree) == 0
    assert capsys.readouterr().out == "nothing to do\n"
    assert fingerprint(tree) == before


def test_what_was_left_in_the_middle_is_finished_or_undone(tree):
    """An interrupted command leaves some files changed: either command then ends the mixture."""
    before = fingerprint(tree)
    apply_diffs(tree, DIFFS[:4])
    assert states(tree) == {"applied", "not applied"}
    assert patch("check", tree) == 1
    assert patch("apply", tree) == 0
    assert states(tree) == {"applied"}
    apply_diffs(tree, DIFFS[2:7], reverse=True)
    assert patch("revert", tree) == 0
    assert fingerprint(tree) == before


def edit(path):
    path.write_bytes(path.read_bytes() + b"\n")


@pytest.mark.parametrize(("action", "damage"), [("apply", edit), ("revert", Path.unlink)])
def test_a_tree_of_unknown_source_is_refused_and_left_alone(tree, capsys, action, damage):
    """The file is named, with what was expected and what was found; the others stay as they are."""
    if action == "revert":
        patch("apply", tree)
    damage(tree / VICTIM)
    before = fingerprint(tree)
    capsys.readouterr()
    assert patch(action, tree) == 2
    assert fingerprint(tree) == before
    said = capsys.readouterr().err.splitlines()
    assert "expected the files of core_v0.19.0, got others (megatron-core " in said[0]
    assert "`moe-optim run`, which needs no diffs" in said[-1]
    (line,) = [x for x in said if "unknown source" in x]
    (diff,) = [diff for diff in DIFFS if diff.path == VICTIM]
    assert line.startswith(f"  {VICTIM}: unknown source: expected git object ")
    assert diff.before[:12] in line and diff.after[:12] in line
    assert patch("check", tree) == 2


def test_a_file_that_stands_where_the_hook_goes_is_refused(tree):
    (tree / "megatron" / "core" / "moe_optim_hook.py").write_text("mine = True\n")
    before = fingerprint(tree)
    assert patch("apply", tree) == 2
    assert fingerprint(tree) == before


def test_a_tree_below_a_repository_of_another_project_is_patched(tree):
    """Git would take the paths of the diffs for those of the repository around it."""
    subprocess.run(["git", "init", "-q", str(tree.parent)], check=True)
    assert patch("apply", tree) == 0
    assert states(tree) == {"applied"}


def test_nothing_is_changed_where_git_refuses_one_of_the_diffs(tree, tmp_path):
    """A diff file that was edited by hand."""
    (diff,) = [diff for diff in DIFFS if diff.path == VICTIM]
    edited = tmp_path / "edited.patch"
    edited.write_text(re.sub(r"^ (?=\S)", " no such line ", diff.file.read_text(), flags=re.M))
    diffs = [replace(one, file=edited) if one is diff else one for one in DIFFS]
    before = fingerprint(tree)
    with pytest.raises(PatchError, match="expected git to apply the diffs, got: error: patch fail"):
        apply_diffs(tree, diffs)
    assert fingerprint(tree) == before
