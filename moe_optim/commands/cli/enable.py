"""``moe-optim enable``: plain ``python`` and ``torchrun`` of this environment take the flag."""

import argparse

from moe_optim.commands.console.site_file import enable, site_file


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the ``enable`` command."""
    subparsers.add_parser(
        "enable",
        help="let plain python and torchrun of this environment take --use-moe-grouped-optim",
        description="Write one file, moe_optim_enable.pth, into this environment's site-packages. "
        "From then on `python SCRIPT ARGS --use-moe-grouped-optim`, also under torchrun, does what "
        "`moe-optim run` does, as soon as SCRIPT has imported megatron.training. A Python that is "
        "started without the flag imports nothing of this package. `moe-optim disable` removes "
        "the file.",
        allow_abbrev=False,
    )


def run(_args: argparse.Namespace) -> int:
    """Write the file and say where it is; raises as ``site_file.enable`` does."""
    if enable():
        print(f"enabled: wrote {site_file()}")
        print("Scripts that import megatron.training now take --use-moe-grouped-optim.")
        print("`moe-optim disable` removes the file; do so before you uninstall moe_optim.")
    else:
        print(f"enabled already: {site_file()}")
    return 0
