"""Lists every fault of a command line, where argparse and Megatron stop at the first."""

import ast
import functools
import inspect
import io
import textwrap
from argparse import ArgumentError, ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any, NoReturn

from moe_optim.errors import closest
from moe_optim.integration.argv import without_options


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


class _ExitError(Exception):
    """Replaces argparse's exit."""


class FaultyFlags:
    """A command line, parsed without its faults.

    Args:
        parser: parser, which raises its errors from now on.
        argv: words of the command line.
        takes_unknown: whether others parse the flags that ``parser`` does not know.
    """

    def __init__(
        self, parser: ArgumentParser, argv: Sequence[str], *, takes_unknown: bool = False
    ) -> None:
        self.faults: list[str] = []
        self.argv = list(argv)
        """Words without faulty ones, with misspelled names corrected."""
        self.dropped: set[str] = set()
        """Flags with invalid values."""
        if not takes_unknown:
            self._mend_names(parser)
        self.args, rest = self._parse(parser)
        """None if some fault is not that of a flag."""
        if rest and not takes_unknown:
            self.faults.append(f"{' '.join(rest)}: belongs to no flag. Remove it.")

    def _mend_names(self, parser: ArgumentParser) -> None:
        known = [name for name in parser._option_string_actions if name.startswith("--")]
        mended: list[str] = []
        is_kept = True
        for word in self.argv:
            flag, equals, value = word.partition("=")
            if not flag.startswith("--") or flag in known or flag == "--":
                if is_kept or flag.startswith("--"):
                    mended.append(word)
                    is_kept = True
                continue
            meant = closest(flag, known, likeness=0.75)  # all share a prefix
            remedy = f"Write {meant}, the closest one" if meant else "Remove it"
            self.faults.append(f"{flag}: no such flag. {remedy}.")
            is_kept = meant is not None
            mended += [f"{meant}{equals}{value}"] if meant else []
        self.argv = mended

    def _parse(self, parser: ArgumentParser) -> tuple[Namespace | None, list[str]]:
        """Parse, dropping flags with invalid values one by one; also return words of no flag."""
        parser.exit_on_error = False
        parser.error = _raise  # type: ignore[method-assign]
        while True:
            try:
                return ArgumentParser.parse_known_args(parser, self.argv)
            except ArgumentError as error:
                is_bare = error.message.startswith("expected ")  # one argument, or more
                remedy = "Give the value" if is_bare else "Change the value"
                self.faults.append(f"{error}. {remedy}.".replace("argument ", "", 1))
                flags = set((error.argument_name or "").split("/"))
                shorter = without_options(self.argv, flags)
                if len(shorter) == len(self.argv):  # not caused by a flag: stop here
                    return None, []
                self.argv = shorter
                self.dropped |= flags
            except (_ExitError, AssertionError) as error:
                self.faults.append(f"{error}.")
                return None, []


def _raise(message: str) -> NoReturn:
    raise _ExitError(message)
