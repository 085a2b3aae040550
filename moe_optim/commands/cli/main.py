"""The ``moe-optim`` command: finds the command asked for and turns errors into exit codes."""

import argparse
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from moe_optim import __version__
from moe_optim.commands.console.pictures import picture_path
from moe_optim.errors import ConfigError, MoEOptimError, closest
from moe_optim.screen import Screen, discard_output, fail

BAD_INPUT, INTERRUPTED = 2, 130  # argparse itself exits with 2
PIPE_CLOSED = 141  # as of a process that SIGPIPE ends, though a command runs to its end

COMMANDS = (
    "train", "run", "enable", "disable", "recipes", "patch", "plan", "doctor",
    "inspect", "convert", "export", "verify", "report", "compare",
)  # fmt: skip
"""Modules of this package. The docstring of each is the description of its command. Each has
``HELP`` and ``run(args) -> int``, and perhaps ``add_arguments(parser)`` and ``USAGE``."""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line; importing Megatron is left to the commands."""
    parser = argparse.ArgumentParser(
        prog="moe-optim",
        description="Train Megatron MoE models with quantized expert weights.",
        epilog="Exit codes: 0 done, 1 the run failed, 2 bad input, 130 interrupted, 141 nobody "
        "read what was printed.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"moe-optim {__version__}")
    parser.add_argument(
        "--print-completion",
        choices=("bash", "zsh"),
        action=_PrintCompletion,
        help="print what a shell needs to complete commands, options and files",
    )
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        command: Any = _module_of(name)
        added = subparsers.add_parser(
            name,
            help=command.HELP,
            description=command.__doc__,
            usage=getattr(command, "USAGE", None),
            allow_abbrev=False,
        )
        if hasattr(command, "add_arguments"):
            command.add_arguments(added)
    return parser


def _module_of(command: str) -> Any:
    return importlib.import_module(f"moe_optim.commands.cli.{command}")


class _PrintCompletion(argparse.Action):
    """Prints the completion script of a shell, by shtab, and ends."""

    def __call__(self, parser: argparse.ArgumentParser, *values: Any) -> None:
        try:
            import shtab
        except ImportError as error:
            raise ConfigError(
                "--print-completion: expected shtab, got none. Install it: "
                "pip install 'moe_optim[completion]'"
            ) from error
        for action in _actions(parser):
            if action.type in (Path, picture_path):
                action.complete = shtab.FILE  # type: ignore[attr-defined]
        print(shtab.complete(parser, values[1]))
        parser.exit()


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the options and positionals of all commands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _actions(inner)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; ``argv`` is that of the process if None."""
    return run_command(build_parser, lambda args: int(_module_of(args.command).run(args)), argv)


def run_command(
    parser_of: Callable[[], argparse.ArgumentParser],
    run: Callable[[argparse.Namespace], int],
    argv: Sequence[str] | None,
) -> int:
    """Parse a command line, run it, and return the exit code.

    Args:
        parser_of: function that returns the parser.
        run: function that takes the parsed arguments, with ``argv`` among them, and returns an
            exit code.
        argv: arguments; None for those of the process.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(parser_of(), run, argv)
    except KeyboardInterrupt:  # also while an error is printed
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _run(
    parser: argparse.ArgumentParser,
    run: Callable[[argparse.Namespace], int],
    argv: list[str],
) -> int:
    try:
        args, unknown = parser.parse_known_args(argv)
        if unknown:
            _refuse(parser, args, unknown)
        args.argv = argv
        code = run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # of print; files have been written by then
        discard_output()
        return PIPE_CLOSED
    except MoEOptimError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    except OSError as error:  # such as a full disk, or a file where a folder is expected
        where = "" if error.filename is None else f"{error.filename}: "
        code = fail(f"{where}{error.strerror or error}")
        try:
            sys.stdout.flush()
        except OSError:  # it is stdout that takes no more
            discard_output()
        return code
    return PIPE_CLOSED if Screen.lost_reader and not code else code


def _refuse(
    parser: argparse.ArgumentParser, args: argparse.Namespace, unknown: Sequence[str]
) -> NoReturn:
    """End as argparse does, with the usage of the command itself and its closest options."""
    while chosen := _chosen(parser, args):
        parser = chosen
    names = [word.partition("=")[0] for word in unknown if word.startswith("-")]
    known = list(parser._option_string_actions)
    meant = [close for name in names if (close := closest(name, known))]
    remedy = f". The closest: {', '.join(meant)}" if meant else ""
    parser.error(f"unrecognized arguments: {' '.join(unknown)}{remedy}")


def _chosen(
    parser: argparse.ArgumentParser, args: argparse.Namespace
) -> argparse.ArgumentParser | None:
    """Return the parser of the subcommand that was asked for, if there is one."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found: argparse.ArgumentParser | None = action.choices.get(getattr(args, action.dest))
            return found
    return None


if __name__ == "__main__":
    sys.exit(main())
