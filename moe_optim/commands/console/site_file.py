"""The file that ``moe-optim enable`` writes into the environment's packages, and removes again.

Python runs the line of such a file, ``*.pth``, whenever it starts, before it looks for the program.
"""

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
"""``sys.argv`` does not exist yet. Without the flag nothing more is imported."""


def site_file() -> Path:
    """Return the path of the file in this environment, whether it exists or not."""
    return Path(sysconfig.get_path("purelib")) / "moe_optim_enable.pth"


def is_enabled() -> bool:
    """Return whether plain ``python`` of this environment takes the plug-in's flags."""
    return _content() == CONTENT


def enable() -> bool:
    """Write the file and return True, or False if it was there already.

    Raises:
        ConfigError: the folder cannot be written in, or another's file has the name.
    """
    if _own_content() == CONTENT:
        return False
    with _refusing():
        write_atomically(site_file(), CONTENT)
    return True


def disable() -> bool:
    """Remove the file and return True, or False if there was none.

    Raises:
        ConfigError: the file cannot be removed, or is another's.
    """
    if _own_content() is None:
        return False
    with _refusing():
        site_file().unlink()
    return True


def _content() -> bytes | None:
    with _refusing(), contextlib.suppress(FileNotFoundError):
        return site_file().read_bytes()
    return None


def _own_content() -> bytes | None:
    """Return the content of the file; that of another version of this package counts as ours."""
    content = _content()
    if content is None or content.startswith(_MARK):
        return content
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
