"""Write one file, moe_optim_enable.pth, into this environment's site-packages.

From then on `python SCRIPT ARGS --use-moe-grouped-optim`, also under torchrun, does the same as
`moe-optim run`, as soon as SCRIPT has imported megatron.training. Without the flag, Python imports
nothing of this package. `moe-optim disable` removes the file.
"""

import argparse
import contextlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from moe_optim.commands.console.files import write_atomically
from moe_optim.errors import ConfigError

_MARK = b"# Written by `moe-optim enable`; `moe-optim disable` removes it.\n"
CONTENT = _MARK + (
    b"import sys; '--use-moe-grouped-optim' in sys.orig_argv and "
    b"__import__('moe_optim.import_hook', fromlist=['arm']).arm()\n"
)
"""``sys.argv`` is not set yet. Without the flag, only ``sys`` is imported."""


def site_file() -> Path:
    """Return the path of the file in this environment, existing or not."""
    return Path(sysconfig.get_path("purelib")) / "moe_optim_enable.pth"


def is_enabled() -> bool:
    """Return whether plain ``python`` of this environment accepts the plug-in's flags."""
    with _refusing():
        return site_file().exists() and site_file().read_bytes() == CONTENT


def enable() -> bool:
    """Write the file and return True, or False if it exists; ConfigError if that is impossible."""
    if _is_own() and is_enabled():
        return False
    with _refusing():
        write_atomically(site_file(), CONTENT)
    return True


def disable() -> bool:
    """Remove the file and return True, or False without one; ConfigError if that is impossible."""
    is_there = _is_own()
    with _refusing():
        site_file().unlink(missing_ok=True)
    return is_there


def _is_own() -> bool:
    """Return whether any version of this package wrote the file; ConfigError if others did."""
    with _refusing():
        if not site_file().exists():
            return False
        if site_file().read_bytes().startswith(_MARK):
            return True
    raise ConfigError(
        f"{site_file()}: expected no file, or one that moe-optim enable wrote, got another. Move "
        "it away."
    )


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{site_file()}: expected a file that may be written, got: {error.strerror}. Call it "
            "as the owner of this environment or in a virtual environment of your own, or start "
            "scripts with `moe-optim run`, which writes nothing."
        ) from error


def run(_args: argparse.Namespace) -> int:
    """Write the file and print its path."""
    if enable():
        print(f"enabled: wrote {site_file()}")
        print("Scripts that import megatron.training now accept --use-moe-grouped-optim.")
        print("`moe-optim disable` removes the file; do so before you uninstall moe_optim.")
    else:
        print(f"enabled already: {site_file()}")
    return 0
