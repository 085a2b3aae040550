"""``moe-optim disable``: takes back what ``moe-optim enable`` wrote."""

import argparse

from moe_optim.commands.console.site_file import disable, site_file


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the ``disable`` command."""
    text = "remove the file that `moe-optim enable` wrote; nothing else was changed"
    subparsers.add_parser("disable", help=text, description=text, allow_abbrev=False)


def run(_args: argparse.Namespace) -> int:
    """Remove the file and say so; raises as ``site_file.disable`` does."""
    print(f"disabled: removed {site_file()}" if disable() else f"not enabled: no {site_file()}")
    return 0
