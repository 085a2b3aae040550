"""Parses flags past misspelled names and invalid values, and lists these."""

from argparse import ArgumentError, ArgumentParser, Namespace
from collections.abc import Sequence
from typing import NoReturn

from moe_optim.errors import closest
from moe_optim.integration.argv import without_options


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
