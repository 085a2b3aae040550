"""Calls in the source of a script."""

import ast
from collections.abc import Iterator
from typing import Any


def blocks_of(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield a module and all of its functions."""
    yield tree
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def calls_of(block: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield name and line of every call in a block, without nested functions."""
    for child in ast.iter_child_nodes(block):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        yield from calls_of(child)
        if isinstance(child, ast.Call):
            target: Any = child.func
            yield str(getattr(target, "attr", getattr(target, "id", ""))), child.lineno
