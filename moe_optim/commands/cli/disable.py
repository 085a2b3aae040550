"""Remove the file that `moe-optim enable` wrote; it changed nothing else."""

import argparse

from moe_optim.commands.cli.enable import disable, site_file


def run(_args: argparse.Namespace) -> int:
    """Remove the file and print its path; raises as ``site_file.disable`` does."""
    print(f"disabled: removed {site_file()}" if disable() else f"not enabled: no {site_file()}")
    return 0
