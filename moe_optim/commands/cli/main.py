"""The ``moe-optim`` command: finds the command asked for and turns errors into exit codes."""

import sys

BAD_INPUT, INTERRUPTED = 2, 130  # argparse itself exits with 2
PIPE_CLOSED = 141  # as of a process that SIGPIPE ends, though a command goes on to its end


def _report_interrupt() -> int:
    """Say that Ctrl-C ended it, and return the exit code."""
    print("interrupted", file=sys.stderr)
    return INTERRUPTED


try:
    import argparse
    import importlib
    from collections.abc import Callable, Sequence
    from typing import NoReturn

    from moe_optim import __version__
    from moe_optim.commands.console.completion import SHELLS, PrintCompletion
    from moe_optim.errors import MoEOptimError, closest
    from moe_optim.screen import Screen, discard_output, fail
except KeyboardInterrupt:  # these take long enough for Ctrl-C to come between
    sys.exit(_report_interrupt())

COMMANDS = (
    "train", "run", "enable", "disable", "recipes", "patch", "plan", "doctor",
    "inspect", "convert", "export", "verify", "report", "compare",
)  # fmt: skip
"""Modules of this package; each has ``add_parser(subparsers)`` and ``run(args) -> int``."""


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
        choices=SHELLS,
        action=PrintCompletion,
        help="print what a shell needs to complete commands, options, files and recipes",
    )
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        importlib.import_module(f"moe_optim.commands.cli.{name}").add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; without ``argv``, that of the process."""
    return run_command(build_parser, _run_chosen, argv)


def _run_chosen(args: argparse.Namespace) -> int:
    return int(importlib.import_module(f"moe_optim.commands.cli.{args.command}").run(args))


def run_command(
    parser_of: Callable[[], argparse.ArgumentParser],
    run: Callable[[argparse.Namespace], int],
    argv: Sequence[str] | None,
) -> int:
    """Parse a command line, run it, and return the exit code.

    Args:
        parser_of: function that returns the parser.
        run: function that takes the parsed arguments and returns an exit code.
        argv: arguments; None for those of the process.
    """
    try:
        return _run(parser_of, run, argv)
    except KeyboardInterrupt:  # also while an error is said
        return _report_interrupt()


def _run(
    parser_of: Callable[[], argparse.ArgumentParser],
    run: Callable[[argparse.Namespace], int],
    argv: Sequence[str] | None,
) -> int:
    """Do the same, but for Ctrl-C."""
    try:
        parser = parser_of()
        args, unknown = parser.parse_known_args(argv)
        if unknown:
            _refuse(parser, args, unknown)
        args.argv = list(sys.argv[1:] if argv is None else argv)
        code = run(args)
        sys.stdout.flush()
        if Screen.lost_reader and not code:
            return PIPE_CLOSED
    except BrokenPipeError:  # of print; files have been written by then
        discard_output()
        return PIPE_CLOSED
    except MoEOptimError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    except OSError as error:  # such as a full disk, or a file where a folder is wanted
        return _report_refusal(error)
    return code


def _report_refusal(error: OSError) -> int:
    """Say what the system refused, of which file, and return the exit code."""
    where = "" if error.filename is None else f"{error.filename}: "
    code = fail(f"{where}{error.strerror or error}")
    try:
        sys.stdout.flush()
    except OSError:  # it is stdout that takes no more
        discard_output()
    return code


def _refuse(
    parser: argparse.ArgumentParser, args: argparse.Namespace, unknown: Sequence[str]
) -> NoReturn:
    """End as argparse does, with the usage of the command itself and the closest options it has."""
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
