"""Write one file, moe_optim_enable.pth, into this environment's site-packages.

From then on `python SCRIPT ARGS --use-moe-grouped-optim`, also under torchrun, does what
`moe-optim run` does, as soon as SCRIPT has imported megatron.training. A Python that is started
without the flag imports nothing of this package. `moe-optim disable` removes the file.
"""

import argparse

from moe_optim.commands.console.site_file import enable, site_file

HELP = "let plain python and torchrun of this environment take --use-moe-grouped-optim"


def run(_args: argparse.Namespace) -> int:
    """Write the file and say where it is; raises as ``site_file.enable`` does."""
    if enable():
        print(f"enabled: wrote {site_file()}")
        print("Scripts that import megatron.training now take --use-moe-grouped-optim.")
        print("`moe-optim disable` removes the file; do so before you uninstall moe_optim.")
    else:
        print(f"enabled already: {site_file()}")
    return 0
