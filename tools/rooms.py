"""Rooms of moe_optim, their floors and their imports, read from the sources."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "moe_optim"

ORDER = """
errors version library screen spelling import_hook places
environment rules formats experts/keys checkpoint/files
config formats/reference kernels integration/engine integration/agreement
ops integration/patches integration/installation
parts weights
buckets
calibration
experts
checkpoint health rollout
optimizer
integration
.
commands
benchmarks
""".strip().splitlines()
"""Rooms, one line per floor: a room imports from lower floors, and from its own floor if necessary,
without cycles. A file beside folders is a room of its own; ``.`` is the package.
"""

FLOORS = {room: floor for floor, line in enumerate(ORDER) for room in line.split()}


@cache
def sources() -> list[Path]:
    """Return all files of the package, sorted."""
    return sorted(PACKAGE.rglob("*.py"))


@cache
def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def room_of(path: Path) -> str:
    """Return the longest folder of a file that is on a floor, or the file itself beside folders."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    if parts == ("__init__",):
        return "."
    names = ["/".join(parts[:count]) for count in range(len(parts), 0, -1)]
    return next((name for name in names if name in FLOORS), names[-1])


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """Yield the dotted name of every module that any statement of a file imports.

    ``from a import b`` counts as ``a.b``, since b may be a module. ``import_module`` and
    ``__import__`` count if called with a literal.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and _called_name(node) in {"import_module", "__import__"}:
            yield from (str(arg.value) for arg in node.args[:1] if isinstance(arg, ast.Constant))


def _called_name(call: ast.Call) -> str | None:
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else None


@cache
def file_of(module: str) -> Path | None:
    """Return the file of this package for a dotted name, None for other packages.

    A name within a file maps to the file.
    """
    parts = module.split(".")
    while parts[0] == PACKAGE.name:
        path = ROOT.joinpath(*parts)
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
        parts.pop()
    return None


@cache
def modules_of(path: Path) -> frozenset[str]:
    """Return the dotted names that a file imports."""
    return frozenset(imported_modules(tree_of(path)))


def own_imports(path: Path) -> set[Path]:
    """Return the files of this package that a file imports."""
    files = map(file_of, modules_of(path))
    return {file for file in files if file is not None and file != path}
