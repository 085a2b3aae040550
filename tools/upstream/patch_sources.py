"""Compares everything that moe_optim replaces between versions of Megatron.

    python -m tools.upstream.patch_sources PATH [PATH ...] [--json FILE]

Each PATH contains a folder ``megatron``: a checkout, or an unpacked wheel. Compares signatures, and
bodies without docstrings, comments and layout; for a class, the methods that its replacement
overrides. Review a changed body: equal signatures do not prove that a replacement still matches.
Exit status: 1 if a signature changed, or a target is gone.
"""

import argparse
import ast
import hashlib
import importlib.metadata
import inspect
import json
import os
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_optim.commands.console.provenance import commit
from moe_optim.environment import find_package

ROOT = Path(__file__).parents[2]
Target = tuple[str, str]
"""Signature and fingerprint of the body."""


def fingerprint(function: Any) -> str:
    """Return a fingerprint that changes with the code of a function, but not with its text."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:12]


def list_targets() -> Iterator[tuple[str, Target]]:
    """Yield name, signature and fingerprint of every target in the imported Megatron."""
    from moe_optim.integration import cpu_runtime  # noqa: F401 - imports what torch has first
    from moe_optim.integration.engine import form_of, overridden, resolve
    from moe_optim.integration.patches import PATCHES

    for patch in PATCHES:
        try:
            found, ours = resolve(patch.target)[2], resolve(patch.replacement)[2]
        except (ImportError, AttributeError) as error:
            yield patch.id, (f"gone: {error}", "")
            continue
        if isinstance(found, type):
            for name, _, theirs in overridden(found, ours):
                function = getattr(theirs, "__func__", theirs)
                yield f"{patch.id}: {name}", (form_of(theirs), fingerprint(function))
        elif callable(getattr(found, "__func__", found)):
            yield patch.id, (form_of(found), fingerprint(getattr(found, "__func__", found)))
        else:
            yield patch.id, (form_of(found), "")


def ask(path: Path) -> dict[str, Any]:
    """Return version and targets of the Megatron in a folder, imported in a subprocess."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(path.resolve())])}
    command = [sys.executable, "-P", __file__, "--list"]  # a checkout has a package `tests`, too
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, cwd=ROOT, check=False
    )
    if done.returncode:
        sys.exit(f"{path}: expected a Megatron that can be imported, got:\n{done.stderr[-2000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def changes(old: Mapping[str, Sequence[str]], new: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return name -> ``new``, ``gone``, ``signature`` or ``body``, for targets that differ."""
    absent = ("gone", "")
    found = {}
    for name in {**old, **new}:
        before, after = tuple(old.get(name, absent)), tuple(new.get(name, absent))
        if before == after:
            continue
        if before[0].startswith("gone"):
            found[name] = "new"
        elif after[0].startswith("gone"):
            found[name] = "gone"
        else:
            found[name] = "signature" if before[0] != after[0] else "body"
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.upstream.patch_sources")
    parser.add_argument("paths", nargs="*", type=Path, help="the first is what others differ from")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--list", action="store_true", help=argparse.SUPPRESS)
    words = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(words)
    if args.list:
        package = find_package("megatron-core")
        version = package.version if package else importlib.metadata.version("megatron-core")
        print(json.dumps({"version": version, "targets": dict(list_targets())}))
        return 0
    first, *others = [ask(path) for path in args.paths]
    found = [changes(first["targets"], other["targets"]) for other in others]
    for other, one in zip(others, found, strict=True):
        print(f"{first['version']} -> {other['version']}: {len(one)} of {len(first['targets'])}")
        for name, what in one.items():
            print(f"  {what}: {name}: {other['targets'].get(name, ['gone'])[0]}")
    if args.json:
        report = {
            "command": shlex.join(["python", "-m", "tools.upstream.patch_sources", *words]),
            "commit": commit(),
            "versions": [first, *others],
        }
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return int(any(what in ("gone", "signature") for one in found for what in one.values()))


if __name__ == "__main__":
    sys.exit(main())
