"""Lists every check that fails in a function of Megatron, which itself stops at the first."""

import ast
import functools
import inspect
import io
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any


def failed_checks(function: Callable[..., Any], *args: Any) -> list[Exception]:
    """Call a copy of ``function`` that continues past failed checks; return their errors.

    Checks are the ``assert`` and ``raise`` statements of the function itself. The world size is the
    last: other sizes are quotients of it. So is an ``exit()``, whose error is the line printed
    before it. Another error ends the call, and is returned if no check failed before, of which it
    may be a consequence. ``args`` may be modified.
    """
    errors: list[Exception] = []

    def check(error: Exception) -> None:
        errors.append(error)
        if is_of_ranks(error):
            raise error

    function = inspect.unwrap(function)
    source = ast.parse(textwrap.dedent(inspect.getsource(function)))
    code = compile(ast.fix_missing_locations(_Continue().visit(source)), "<checks>", "exec")
    scope = {**function.__globals__, "_check": check, "_type": _owner(function)}
    exec(code, scope)
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            scope[function.__name__](*args)
    except SystemExit as end:
        errors.append(ValueError(last_words(end, printed.getvalue()) or "exit()"))
    except Exception as error:
        return errors or [error]
    return errors


def last_words(end: SystemExit, printed: str) -> str:
    """Return what a program says as it exits: its message, else the last line that it printed."""
    return str(end) if isinstance(end.code, str) else printed.strip().rpartition("\n")[2]


def is_of_ranks(error: Exception) -> bool:
    """Return whether an error is that of a world size that parallel sizes do not divide."""
    return str(error).startswith("world size (")


@contextmanager
def collecting(owner: type, method: str) -> Iterator[list[Exception]]:
    """Let a method list its failed checks, instead of stopping at the first, within a block."""
    stock, errors = getattr(owner, method), []

    @functools.wraps(stock)
    def collect(*args: Any) -> None:
        errors.extend(failed_checks(stock, *args))

    setattr(owner, method, collect)
    try:
        yield errors
    finally:
        setattr(owner, method, stock)


def _owner(function: Callable[..., Any]) -> type | None:
    """Return the class to which a method's ``super()`` refers."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    return cells["__class__"].cell_contents if "__class__" in cells else None


class _Continue(ast.NodeTransformer):
    """Replaces ``assert`` and ``raise`` by calls of ``_check``."""

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        said = node.msg or ast.Constant(f"assert {ast.unparse(node.test)}")
        error = ast.Call(ast.Name("AssertionError", ast.Load()), [said], [])
        is_wrong = ast.UnaryOp(ast.Not(), node.test)
        return ast.copy_location(ast.If(is_wrong, [_call(error)], []), node)

    def visit_Raise(self, node: ast.Raise) -> ast.stmt:
        return node if node.exc is None else ast.copy_location(_call(node.exc), node)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        if ast.unparse(node) == "super()":  # outside of a class
            return ast.parse("super(_type, self)", mode="eval").body
        self.generic_visit(node)
        return node


def _call(error: ast.expr) -> ast.stmt:
    return ast.Expr(ast.Call(ast.Name("_check", ast.Load()), [error], []))
