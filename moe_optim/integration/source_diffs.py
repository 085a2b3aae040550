"""The table of patches as source diffs: what they are, and putting them into a tree and out again.

Diffs name the git object of the file before and after, so a file is known by all of its bytes: it
is the one that the diff was made from, or the one that it makes, or refused.
"""

import hashlib
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moe_optim.environment import NEEDED, read_core_version
from moe_optim.errors import PatchError

FOLDER = Path(__file__).with_name("megatron-lm-0.19")
"""The diffs, ``*.patch``; each changes one file."""

_HEAD = re.compile(r"^index (\w{40})\.\.(\w{40}).*\n--- .+\n\+\+\+ b/(.+)\n", re.M)
_HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@\n((?:[ +-].*\n)+)", re.M)
_PATCH_ID = re.compile(r'^\+.*?replaceable\((?:\n\+)?\s*"([\w-]+)"', re.M)
_NO_FILE = "0" * 40
_KNOWN = ("applied", "not applied")


@dataclass(frozen=True, kw_only=True)
class Side:
    """One side of a hunk: lines that follow each other in a file."""

    start: int
    """Index of the first line, from 0."""
    lines: tuple[bytes, ...]


@dataclass(frozen=True, kw_only=True)
class SourceDiff:
    """What becomes of one file of a tree."""

    path: str
    """The file, relative to the tree."""
    before: str | None
    """Git object of the file before; None if there is no such file."""
    after: str | None
    """Git object of the file after; None if there is no such file."""
    hunks: tuple[tuple[Side, Side], ...]
    """Sides before and after."""
    patch_ids: tuple[str, ...]
    """Patches of the table that it stands for; none for what all of them need."""

    def state(self, tree: Path) -> str:
        """Return ``applied``, ``not applied``, or ``unknown source: <expected and found>``."""
        found = _git_object(_read(tree / self.path))
        if found == self.after:
            return "applied"
        if found == self.before:
            return "not applied"
        expected, with_diff, got = (
            name[:12] if name else "no file" for name in (self.before, self.after, found)
        )
        return f"unknown source: expected git object {expected} or {with_diff}, got {got}"

    def inverse(self) -> "SourceDiff":
        """Return the diff that undoes this one."""
        hunks = tuple((after, before) for before, after in self.hunks)
        return replace(self, before=self.after, after=self.before, hunks=hunks)

    def content_after(self, content: bytes | None) -> bytes | None:
        """Return the content of the file after, given that before; None is no file.

        Raises:
            PatchError: the diff does not make what it says that it makes.
        """
        lines = (content or b"").splitlines(keepends=True)
        for before, after in reversed(self.hunks):
            end = before.start + len(before.lines)
            if tuple(lines[before.start : end]) != before.lines:
                raise PatchError(f"{self.path}: line {before.start + 1}: the diff does not fit")
            lines[before.start : end] = after.lines
        made = None if self.after is None else b"".join(lines)
        if _git_object(made) != self.after:
            raise PatchError(
                f"{self.path}: expected the diff to make {self.after}, got {_git_object(made)}"
            )
        return made


def load_diffs(folder: Path = FOLDER) -> tuple[SourceDiff, ...]:
    """Read every diff of a folder, by the files that they change; PatchError without any."""
    diffs = [_parse(path.read_text()) for path in folder.glob("*.patch")]
    if not diffs:
        raise PatchError(f"{folder}: expected source diffs, found none. Install moe_optim again.")
    return tuple(sorted(diffs, key=lambda diff: diff.path))


def apply_diffs(tree: Path, diffs: Sequence[SourceDiff]) -> list[str]:
    """Put all diffs into a tree, or none, and return the files that were changed.

    Those that are there already are left alone.

    Raises:
        PatchError: a file is neither as before nor as after; nothing was changed.
    """
    unknown = [f"{d.path}: {d.state(tree)}" for d in diffs if d.state(tree) not in _KNOWN]
    if unknown:
        lines = "\n  ".join(unknown)
        version = read_core_version(tree / "megatron" / "core")
        raise PatchError(
            f"{tree}: expected the files of core_v0.19.0, got others (megatron-core {version}), "
            f"and changed nothing:\n  {lines}\n"
            "Check out that tag, or run its scripts with `moe-optim run`, which needs no diffs and "
            f"takes megatron-core {NEEDED['megatron-core']}."
        )
    waiting = [diff for diff in diffs if diff.state(tree) == "not applied"]
    _write({tree / d.path: d.content_after(_read(tree / d.path)) for d in waiting})
    return [diff.path for diff in waiting]


def revert_diffs(tree: Path, diffs: Sequence[SourceDiff]) -> list[str]:
    """Take all diffs out of a tree, or none; every file is then as it was, to the byte.

    Returns and raises what :func:`apply_diffs` does.
    """
    return apply_diffs(tree, [diff.inverse() for diff in diffs])


def _parse(text: str) -> SourceDiff:
    head = _HEAD.search(text)
    assert head is not None, text
    before, after, path = head.groups()
    hunks = []
    for found in _HUNK.finditer(text, head.end()):
        lines = found[5].encode().splitlines(keepends=True)
        hunks.append(
            (_side(lines, b"-", *found.group(1, 2)), _side(lines, b"+", *found.group(3, 4)))
        )
    return SourceDiff(
        path=path,
        before=None if before == _NO_FILE else before,
        after=after,
        hunks=tuple(hunks),
        patch_ids=tuple(sorted(set(_PATCH_ID.findall(text)))),
    )


def _side(lines: Sequence[bytes], mark: bytes, number: str, count: str | None) -> Side:
    """Return the lines of a hunk that are common or bear ``mark``, and where they stand."""
    own = tuple(line[1:] for line in lines if line[:1] in (b" ", mark))
    return Side(start=int(number) - (count != "0"), lines=own)  # without lines: the line before


def _git_object(content: bytes | None) -> str | None:
    """Return the name that git gives to a file's content; None where there is no file."""
    if content is None:
        return None
    header = b"blob %d\0" % len(content)
    return hashlib.sha1(header + content, usedforsecurity=False).hexdigest()


def _read(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _write(changes: Mapping[Path, bytes | None]) -> None:
    """Give every file its new content; all are on the disk before the first takes its place."""
    staged = {path: path.with_name(f".{path.name}.moe_optim") for path in changes}
    try:
        for path, content in changes.items():
            if content is not None:
                staged[path].write_bytes(content)
                if path.exists():
                    shutil.copymode(path, staged[path])
        for path, content in changes.items():
            if content is not None:
                staged[path].replace(path)
            else:
                path.unlink()
                for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
                    compiled.unlink()
    finally:
        for temporary in staged.values():
            temporary.unlink(missing_ok=True)
