"""What a shell completes of a command line, by shtab."""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from moe_optim.commands.console.pictures import picture_path
from moe_optim.config.shipped_recipes import shipped_recipes
from moe_optim.errors import ConfigError

SHELLS = ("bash", "zsh")
_RECIPES = "_moe_optim_recipes"
_PREAMBLE = {
    "bash": f'{_RECIPES}() {{ compgen -W "{{names}}" -- "$1"; compgen -f -- "$1"; }}',
    "zsh": f"{_RECIPES}() {{ compadd {{names}}; _files }}",
}


class PrintCompletion(argparse.Action):
    """Prints what a shell has to read, and ends."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Print it.

        Raises:
            ConfigError: shtab is not installed.
        """
        print(complete(parser, str(values)))
        parser.exit()


def complete(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the script that completes the commands of a parser: options, files and recipes.

    Args:
        parser: of the whole command line.
        shell: one of :data:`SHELLS`.

    Raises:
        ConfigError: shtab is not installed.
    """
    try:
        import shtab
    except ImportError as error:
        raise ConfigError(
            "--print-completion: expected shtab, got none. Install it: "
            "pip install 'moe_optim[completion]'"
        ) from error
    for action in _actions(parser):
        if action.metavar == "RECIPE" or action.dest == "recipe":
            action.complete = dict.fromkeys(SHELLS, _RECIPES)  # type: ignore[attr-defined]
        elif action.type in (Path, picture_path):
            is_folder = action.metavar in ("DIR", "RUN", "DST", "CKPT")
            found = shtab.DIRECTORY if is_folder else shtab.FILE
            action.complete = found  # type: ignore[attr-defined]
    names = " ".join(shipped_recipes())
    preamble = _PREAMBLE[shell].replace("{names}", names)
    return str(shtab.complete(parser, shell, preamble=preamble))


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the options and positionals of all commands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _actions(inner)
