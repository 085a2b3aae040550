"""A hash of the code that GPUs execute: Triton kernels and their tuned constants."""

import ast
import hashlib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path

import moe_optim

Definition = ast.FunctionDef | ast.expr


def kernel_sources() -> dict[str, str]:
    """Return path -> source of every file of ``moe_optim/kernels``."""
    folder = Path(moe_optim.__file__).parent / "kernels"
    paths = sorted(folder.rglob("*.py"))
    return {path.relative_to(folder).as_posix(): path.read_text("utf-8") for path in paths}


def hash_kernels(sources: Mapping[str, str]) -> str:
    """Return 12 hex digits that change with the code of a kernel or with a tuned constant.

    The hash covers functions under ``triton.jit``, module-level values that contain a number, and
    everything these refer to. It ignores names, comments, docstrings, order, files and host code,
    so a renamed or moved kernel keeps its hash.

    Args:
        sources: file -> Python source; a name defined in two files must mean the same in both.
    """
    definitions: dict[str, Definition] = {}
    for source in sources.values():
        definitions.update(_definitions_of(ast.parse(source)))

    @cache
    def digest_of(name: str) -> str:
        definition = definitions[name]
        text = _Canonical(definition, definitions, digest_of).text(definition)
        return hashlib.sha256(text.encode()).hexdigest()

    digests = sorted({digest_of(name) for name, one in definitions.items() if _counts(one)})
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:12]


def _definitions_of(module: ast.Module) -> Iterator[tuple[str, Definition]]:
    for node in module.body:
        if isinstance(node, ast.FunctionDef) and any(map(_is_jit, node.decorator_list)):
            yield node.name, node
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name):
                yield target.id, node.value


def _is_jit(decorator: ast.expr) -> bool:
    return ast.unparse(decorator).startswith("triton.jit")


def _counts(definition: Definition) -> bool:
    """Return whether a definition is hashed even if no kernel refers to it."""
    constants = (node.value for node in ast.walk(definition) if isinstance(node, ast.Constant))
    is_tuned = any(isinstance(constant, int | float) for constant in constants)
    return isinstance(definition, ast.FunctionDef) or is_tuned


class _Canonical(ast.NodeTransformer):
    """Renames parameters and locals to their order of appearance, and globals to their digests."""

    def __init__(
        self,
        definition: Definition,
        definitions: Mapping[str, Definition],
        digest_of: Callable[[str], str],
    ) -> None:
        self._own = definition
        self._definitions, self._digest_of = definitions, digest_of
        self._locals: dict[str, str] = {}
        for node in ast.walk(definition):
            if isinstance(node, ast.arg):
                self._locals.setdefault(node.arg, f"local{len(self._locals)}")
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self._locals.setdefault(node.id, f"local{len(self._locals)}")

    def text(self, definition: Definition) -> str:
        """Return the canonical text of a definition, which is not modified."""
        tree = ast.parse(ast.unparse(definition))
        if isinstance(definition, ast.FunctionDef):
            function = tree.body[0]
            assert isinstance(function, ast.FunctionDef)
            function.name = "kernel"
            if ast.get_docstring(function) is not None:
                function.body = function.body[1:]
        return ast.dump(self.visit(tree))

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name(id=self._name(node.id), ctx=node.ctx)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        annotation = self.visit(node.annotation) if node.annotation else None
        return ast.arg(arg=self._name(node.arg), annotation=annotation)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        callee = self._definitions.get(node.func.id) if isinstance(node.func, ast.Name) else None
        self.generic_visit(node)
        if isinstance(callee, ast.FunctionDef):
            order = [argument.arg for argument in callee.args.args]
            for keyword in node.keywords:
                keyword.arg = f"argument{order.index(keyword.arg)}" if keyword.arg else None
        return node

    def _name(self, name: str) -> str:
        if name in self._locals:
            return self._locals[name]
        definition = self._definitions.get(name)
        return name if definition in (None, self._own) else self._digest_of(name)
