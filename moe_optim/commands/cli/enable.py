"""Write one file, moe_optim_enable.pth, into this environment's site-packages.

From then on `python SCRIPT ARGS --use-moe-grouped-optim`, also under torchrun, does the same as
`moe-optim run`, as soon as SCRIPT has imported megatron.training. Without the flag, Python imports
nothing of this package. `moe-optim disable` removes the file.
"""

import argparse

from moe_optim.commands.console.site_file import enable, site_file

HELP = "make plain python and torchrun of this environment accept --use-moe-grouped-optim"


def run(_args: argparse.Namespace) -> int:
    """Write the file and print its path; raises as ``site_file.enable`` does."""
    if enable():
        print(f"enabled: wrote {site_file()}")
        print("Scripts that import megatron.training now take --use-moe-grouped-optim.")
        print("`moe-optim disable` removes the file; do so before you uninstall moe_optim.")
    else:
        print(f"enabled already: {site_file()}")
    return 0
