"""List the recipes that are installed with moe_optim.

`train`, `plan` and `python -m benchmarks step` accept their names in place of a path.
"""

import argparse
import json
import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from rich.padding import Padding

from moe_optim.checkpoint.files.publishing import require_writable
from moe_optim.commands.console.files import write_atomically
from moe_optim.commands.console.tables import build_table
from moe_optim.config import MoEOptimConfig, field_names
from moe_optim.config.recipes import load_recipe, shipped_recipes, suggest_shipped
from moe_optim.errors import ConfigError
from moe_optim.integration.argv import spell_format
from moe_optim.screen import print_table, results_console

_FACTS = ("name", "ranks", "needs", "expert_weights", "what")
_ACTIONS = {
    "list": "list all recipes (default)",
    "show": "show a recipe with its base recipes merged",
    "copy": "copy a recipe and its base recipes, without overwriting files",
}
_LEAST_WIDTH = 100
"""Columns of a terminal that a table takes; in narrower ones each recipe is a paragraph."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.set_defaults(action="list", json=False)
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    added = {
        name: actions.add_parser(name, help=text, description=text, allow_abbrev=False)
        for name, text in _ACTIONS.items()
    }
    for name in ("list", "show"):
        added[name].add_argument("--json", action="store_true", help="print JSON")
    for name in ("show", "copy"):
        text = "name listed by `moe-optim recipes`" + ", or a file" * (name == "show")
        added[name].add_argument("name", metavar="NAME", help=text)
    copy = added["copy"]
    text = "existing folder for the files (default: the current one)"
    copy.add_argument("folder", type=Path, nargs="?", default=Path(), metavar="DIR", help=text)


def run(args: argparse.Namespace) -> int:
    """List, show or copy."""
    if args.action == "copy":
        _copy(args.name, args.folder)
    elif args.action == "show":
        _show(args.name, as_json=args.json)
    else:
        _list(as_json=args.json)
    return 0


def _list(*, as_json: bool) -> None:
    rows = []
    for name, path in shipped_recipes().items():
        recipe = load_recipe(path)
        weights = spell_format(recipe.moe_optim.format, recipe.megatron_argv())
        facts = (name, recipe.ranks, _needs(recipe.requires), weights, _first_sentence(path))
        rows.append(dict(zip(_FACTS, facts, strict=True)))
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    console = results_console()
    if console.is_terminal and console.width < _LEAST_WIDTH:
        for row in rows:
            text = "{name}: ranks {ranks}, {needs}, {expert_weights}".format(**row)
            console.print(text, Padding(str(row["what"]), (0, 0, 0, 2)), sep="\n", soft_wrap=False)
        return
    cells = [[str(value) for value in row.values()] for row in rows]
    header = ["purpose" if fact == "what" else fact.replace("_", " ") for fact in _FACTS]
    print_table(console, build_table(header, cells, fold=("purpose",)))


def _show(name: str, *, as_json: bool) -> None:
    recipe = load_recipe(name)
    content = {"requires": dict(recipe.requires), "megatron_args": dict(recipe.megatron_args)}
    own = {key: getattr(recipe.moe_optim, key) for key in field_names()}
    if as_json:
        files = [str(path) for path in recipe.files]
        print(json.dumps({"files": files, **content, "moe_optim": own}, indent=2))
        return
    default = MoEOptimConfig()
    changed = {key: value for key, value in own.items() if value != getattr(default, key)}
    print("\n".join(f"# {path}" for path in recipe.files))
    print(yaml.safe_dump(content | {"moe_optim": changed}, sort_keys=False), end="")


def _needs(requires: Mapping[str, Any]) -> str:
    if (count := requires.get("gpus")) is None:
        return "CPU or GPU"
    architecture = f", sm {requires['sm']}" if "sm" in requires else ""
    return f"{count} GPU{'s' * (count != 1)}{architecture}"


def _first_sentence(path: Path) -> str:
    lines = re.match(r"(?:#.*\n)*", path.read_text())
    text = re.sub(r"\s*\n?# ?", " ", lines[0] if lines else "").strip()
    return re.split(r"(?<=\.)\s", text, maxsplit=1)[0]


def _copy(name: str, folder: Path) -> None:
    shipped = shipped_recipes()
    if name not in shipped:
        raise ConfigError(
            f"{name}: expected the name of a shipped recipe, got another. {suggest_shipped(name)}"
        )
    if not folder.is_dir():
        got, remedy = "none", f"Make it: mkdir -p {shlex.quote(str(folder))}"
        if os.path.lexists(folder):
            got, remedy = "another file", "Name another"
        raise ConfigError(f"{folder}: expected an existing folder, got {got}. {remedy}.")
    contents = {folder / file.name: file.read_bytes() for file in load_recipe(shipped[name]).files}
    new = {path: content for path, content in contents.items() if not _holds(path, content)}
    require_writable(*new)
    for path, content in new.items():
        write_atomically(path, content)
    for path in contents:
        print(f"{'copied' if path in new else 'there already'}: {path}")


def _holds(path: Path, content: bytes) -> bool:
    """Return whether a file exists with this content; ConfigError if its content differs."""
    if not path.is_symlink() and not path.exists():
        return False
    if path.is_file() and path.read_bytes() == content:
        return True
    raise ConfigError(
        f"{path}: expected no file, or the unmodified recipe, got another file. Name another "
        "folder, or move the file away."
    )
