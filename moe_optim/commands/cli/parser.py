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
            meant = closest(str(value), map(str, action.choices or ()))
            remedy = f". Did you mean {meant}?" if meant else ""
            raise argparse.ArgumentError(action, f"{error.message}{remedy}") from error


class HelpFormatter(argparse.HelpFormatter):
    """Keeps paragraphs, and lines that begin with a blank, of descriptions and epilogs."""

    def _format_usage(self, usage: str | None, *rest: Any) -> str:
        if usage is None:
            return super()._format_usage(usage, *rest)
        lead = "usage: "
        lines = _wrap(f"{lead}{usage}", self._width, subsequent_indent=" " * len(lead))
        return "\n".join(lines) + "\n\n"

    def _split_lines(self, text: str, width: int) -> list[str]:
        return _wrap(text, width)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = []
        for paragraph in text.strip().split("\n\n"):
            lines: list[str] = []
            for item in re.split(r"\n(?= )", paragraph):
                lead = indent + "  " * item.startswith(" ")
                rest = lead + "  " * item.startswith(" ")
                lines += _wrap(item, width, initial_indent=lead, subsequent_indent=rest)
            paragraphs.append("\n".join(lines))
        return "\n\n".join(paragraphs)


def _wrap(
    text: str, width: int, initial_indent: str = "", subsequent_indent: str = ""
) -> list[str]:
    return textwrap.wrap(
        " ".join(text.split()),
        width,
        initial_indent=initial_indent,
        subsequent_indent=subsequent_indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
