"""The patch table as source diffs of a checkout, applied and reverted by ``git apply``.

Each diff records the git object of its file before and after, which identifies the file by content.
"""

import hashlib
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_optim.environment import NEEDED, read_core_version
from moe_optim.errors import PatchError

FOLDER = Path(__file__).with_name("megatron-lm-0.19")
"""Folder of the diffs, ``*.patch``; each changes one file."""

_HEAD = re.compile(r"^index (\w{40})\.\.(\w{40}).*\n--- .+\n\+\+\+ b/(.+)\n", re.M)
_PATCH_ID = re.compile(r'^\+.*?replaceable\((?:\n\+)?\s*"([\w:-]+)"', re.M)


@dataclass(frozen=True)
class SourceDiff:
    """A diff of one file of a tree."""

    file: Path
    path: str  # path of the changed file, relative to the tree
    before: str | None  # git object of the original file; None for a new file
    after: str  # git object of the changed file
    patch_ids: tuple[str, ...]
    """Patches of the table that it implements; empty for shared support code."""

    def state(self, tree: Path) -> str:
        """Return ``applied``, ``not applied``, or ``unknown source: <expected and found>``."""
        found, path = None, tree / self.path
        if path.is_file():
            content = path.read_bytes()
            header = b"blob %d\0" % len(content)
            found = hashlib.sha1(header + content, usedforsecurity=False).hexdigest()
        if found in (self.after, self.before):
            return "applied" if found == self.after else "not applied"
        expected, with_diff, got = (
            name[:12] if name else "no file" for name in (self.before, self.after, found)
        )
        return f"unknown source: expected git object {expected} or {with_diff}, got {got}"


def load_diffs(folder: Path = FOLDER) -> tuple[SourceDiff, ...]:
    """Read all diffs of a folder, sorted by changed file; PatchError if there are none."""
    diffs = []
    for file in folder.glob("*.patch"):
        text = file.read_text()
        head = _HEAD.search(text)
        assert head is not None, file
        before, after, path = head.groups()
        patch_ids = tuple(sorted(set(_PATCH_ID.findall(text))))
        before = before if before.strip("0") else None
        diffs.append(SourceDiff(file, path, before, after, patch_ids))
    if not diffs:
        raise PatchError(f"{folder}: expected source diffs, found none. Install moe_optim again.")
    return tuple(sorted(diffs, key=lambda diff: diff.path))


def apply_diffs(tree: Path, diffs: Sequence[SourceDiff], *, reverse: bool = False) -> list[str]:
    """Apply all diffs to a tree, or none, or revert them; return the changed files.

    Skips diffs that are already applied. PatchError if a file has unknown content, or git is
    missing or fails; nothing was changed.
    """
    states = {diff: diff.state(tree) for diff in diffs}
    unknown = [f"{d.path}: {state}" for d, state in states.items() if state.startswith("unknown")]
    if unknown:
        lines = "\n  ".join(unknown)
        version = read_core_version(tree / "megatron" / "core")
        raise PatchError(
            f"{tree}: expected the files of core_v0.19.0, got others (megatron-core {version}), "
            f"and changed nothing:\n  {lines}\n"
            "Check out that tag, or run its scripts with `moe-optim run`, which needs no diffs and "
            f"takes megatron-core {NEEDED['megatron-core']}."
        )
    waiting = "applied" if reverse else "not applied"
    changed = [diff for diff, state in states.items() if state == waiting]
    if changed:
        _git_apply(tree, b"".join(diff.file.read_bytes() for diff in changed), reverse=reverse)
        unchanged = [diff.path for diff in changed if diff.state(tree) == waiting]
        if unchanged:
            raise PatchError(
                f"{tree}: expected git to change {', '.join(map(str, unchanged))}, got no change. "
                "Run the command outside of git hooks, in a path without colons."
            )
    return [diff.path for diff in changed]


_OTHER_TREE = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX")
"""Variables, set in git hooks, that make git apply diffs to another tree."""


def _git_apply(tree: Path, diffs: bytes, *, reverse: bool) -> None:
    """Apply all diffs or none; git guarantees this for one input, not for several files."""
    command = ["git", "-c", "core.autocrlf=false", "apply", "--whitespace=nowarn"]
    command += ["--reverse"] if reverse else []
    # In an enclosing repository, git would resolve paths relative to its root.
    environment = {name: os.environ[name] for name in os.environ if name not in _OTHER_TREE}
    environment["GIT_CEILING_DIRECTORIES"] = str(tree.resolve().parent)
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, input=diffs, capture_output=True, check=False
        )
    except FileNotFoundError as error:
        raise PatchError(
            f"{tree}: expected git, which applies source diffs, got none. Install git, or run "
            "scripts with `moe-optim run`, which needs no diffs."
        ) from error
    if done.returncode:
        raise PatchError(
            f"{tree}: expected git to apply the diffs, got: {done.stderr.decode().strip()}. "
            "Nothing was changed; `git status` in the tree shows what differs."
        )
