"""The names on the pages of ``docs/api``, read from the sources without importing them."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tools.documents.api_pages import API, LEFT_OUT

ROOT = Path(__file__).parents[2]

Definition = ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign
Function = ast.FunctionDef


@dataclass(frozen=True, eq=False)
class Name:
    """One public name: a function, a class, a member of one, or a constant."""

    path: str
    """Full name by defining module, such as ``moe_optim.formats.BlockScaledFormat.block``."""
    module: str
    node: Definition
    doc: str
    owner: ast.ClassDef | None = None
    shown: str = ""
    """Name by which users import it."""

    @property
    def is_function(self) -> bool:
        return isinstance(self.node, Function) and not is_property(self.node)

    @property
    def own_name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def constructors(self) -> list[Function]:
        """``__init__`` of a class that defines it; records have fields instead."""
        members = self.node.body if isinstance(self.node, ast.ClassDef) else []
        return [m for m in members if isinstance(m, Function) and m.name == "__init__"]


def public_names() -> Iterator[Name]:
    """Yield everything that the pages document, members after their classes."""
    for block in API:
        yield from names_of_block(block)


def names_of_block(block: str) -> Iterator[Name]:
    """Yield the names of one block of :data:`API`, members after their classes."""
    single = {resolve(name)[:2] for name in API[block] if not name.endswith(".*")}
    for name in API[block]:
        if name.endswith(".*"):
            yield from _of_module(name.removesuffix(".*"), single)
        else:
            yield from _with_members(*resolve(name), shown=name)


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(_file(module).read_text(encoding="utf-8"))


def _file(module: str) -> Path:
    path = ROOT / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@cache
def definitions(module: str) -> dict[str, Definition]:
    """Return name -> definition in a module; for overloads, the implementation."""
    return {name: node for node in tree_of(module).body for name in _names_of(node)}


@cache
def imports(module: str) -> dict[str, tuple[str, str | None]]:
    """Return name -> module and name there, None for a module itself; this package only."""
    found: dict[str, tuple[str, str | None]] = {}
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("moe_optim"):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                is_module = _file(inner).is_file()
                target = (inner, None) if is_module else (str(node.module), alias.name)
                found[alias.asname or alias.name] = target
    return found


def resolve(path: str) -> tuple[str, str, Definition]:
    """Return the defining module of a name, its name there, and its definition."""
    module, _, name = path.rpartition(".")
    return find(module, name)


def find(module: str, name: str) -> tuple[str, str, Definition]:
    """Return the same for a name in a module that may have imported it."""
    if name in definitions(module):
        return module, name, definitions(module)[name]
    origin, other = imports(module)[name]
    return find(origin, other or name)


def _names_of(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.AnnAssign):
        return [node.target.id] if isinstance(node.target, ast.Name) else []
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return []


def _of_module(module: str, others: set[tuple[str, str]]) -> Iterator[Name]:
    found = definitions(module)
    listed = found.get("__all__")
    names = ast.literal_eval(listed.value) if listed else [n for n in found if n[0] != "_"]
    for name in names:
        own, inner, node = find(module, name)
        if (own, inner) not in others and f"{own}.{inner}" not in LEFT_OUT:
            yield from _with_members(own, inner, node, shown=f"{module}.{name}")


def _with_members(module: str, name: str, node: Definition, shown: str) -> Iterator[Name]:
    yield Name(f"{module}.{name}", module, node, _doc_of(tree_of(module).body, node), shown=shown)
    if not isinstance(node, ast.ClassDef):
        return
    for member in node.body:
        for inner in _names_of(member):
            if inner[0] != "_" and not _is_setter(member):
                doc = _doc_of(node.body, member)
                yield Name(f"{module}.{name}.{inner}", module, member, doc, owner=node)


def _doc_of(body: list[ast.stmt], node: ast.stmt) -> str:
    """Return the docstring of a function or class, or the string after an assignment."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return ast.get_docstring(node) or ""
    after = body[body.index(node) + 1 :][:1]
    is_string = (
        after
        and isinstance(after[0], ast.Expr)
        and isinstance(after[0].value, ast.Constant)
        and isinstance(after[0].value.value, str)
    )
    return after[0].value.value if is_string else ""


def _is_setter(node: ast.stmt) -> bool:
    decorators = getattr(node, "decorator_list", [])
    return any(isinstance(d, ast.Attribute) and d.attr == "setter" for d in decorators)


def is_property(node: Function) -> bool:
    names = {ast.unparse(decorator) for decorator in node.decorator_list}
    return not names.isdisjoint({"property", "cached_property"})


def parameters(node: Function) -> dict[str, str]:
    """Return name -> annotation of every parameter except ``self`` and ``cls``."""
    given = node.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    every += [one for one in (given.vararg, given.kwarg) if one]
    return {
        one.arg: ast.unparse(one.annotation) if one.annotation else ""
        for one in every
        if one.arg not in ("self", "cls") and one.arg[0] != "_"
    }


def sections(doc: str) -> dict[str, str]:
    """Return heading -> section of a Google docstring; the text before them is under ``""``."""
    parts = re.split(r"^(Args|Attributes|Returns|Yields|Raises):\n", doc, flags=re.M)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def entries(section: str) -> dict[str, str]:
    """Return name -> text of the entries of a section."""
    found = re.split(r"^ {4}\*{0,2}(\w+): ", section, flags=re.M)
    return dict(zip(found[1::2], found[2::2], strict=True))
