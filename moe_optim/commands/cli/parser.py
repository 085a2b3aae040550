"""A parser whose texts fit the terminal, with words and flags unbroken."""

import argparse
import re
import sys
import textwrap
from typing import Any, NoReturn

from moe_optim.errors import closest
from moe_optim.screen import wrap_for_stderr


class Parser(argparse.ArgumentParser):
    """Names the closest choice in errors. Subcommands get the same class."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": HelpFormatter} | options)

    def error(self, message: str) -> NoReturn:
        """Print usage and message, and exit with 2."""
        self.print_usage(sys.stderr)
        self.exit(2, wrap_for_stderr(f"{self.prog}: error: {message}") + "\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            meant = closest(str(value), map(str, action.choices or ()), likeness=0.8)
            remedy = f". Did you mean {meant}?" if meant else ""
            raise argparse.ArgumentError(action, f"{error.message}{remedy}") from error


class HelpFormatter(argparse.HelpFormatter):
    """Keeps paragraphs, and lines that begin with a blank, of descriptions and epilogs."""

    def _format_usage(self, usage: str | None, *rest: Any) -> str:
        if usage is None:
            return super()._format_usage(usage, *rest)
        lead = "usage: "
        lines = _wrap(f"{lead}{usage}", self._width, rest=" " * len(lead))
        return "\n".join(lines) + "\n\n"

    def _split_lines(self, text: str, width: int) -> list[str]:
        return _wrap(text, width)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines: list[str] = []
        for item in re.split(r"\n(?=[ \n])", text.strip()):
            step = "  " * item.startswith(" ")
            lines += [""] * item.startswith("\n")
            lines += _wrap(item, width, indent + step, indent + 2 * step)
        return "\n".join(lines)


def _wrap(text: str, width: int, first: str = "", rest: str = "") -> list[str]:
    wrapper = textwrap.TextWrapper(width, first, rest)
    wrapper.break_long_words = wrapper.break_on_hyphens = False
    return wrapper.wrap(" ".join(text.split()))
