"""The file that ``moe-optim enable`` writes into the environment's packages, and removes again.

Python runs the line of such a file, ``*.pth``, whenever it starts, before it looks for the program.
"""

import sysconfig
from pathlib import Path

from moe_optim.commands.console.files import write_atomically
from moe_optim.errors import ConfigError

_MARK = b"# Written by `moe-optim enable`; `moe-optim disable` removes it.\n"
CONTENT = _MARK + (
    b"import sys; '--use-moe-grouped-optim' in sys.orig_argv and "
    b"__import__('moe_optim.import_hook', fromlist=['arm']).arm()\n"
)
"""``sys.argv`` is not there yet. Without the flag nothing is imported that is not there already."""


def site_file() -> Path:
    """Return where the file of this environment is, or would be."""
    return Path(sysconfig.get_path("purelib")) / "moe_optim_enable.pth"


def is_enabled() -> bool:
    """Return whether plain ``python`` of this environment takes the plug-in's flags."""
    return _content() == CONTENT


def enable() -> bool:
    """Write the file, whole or not at all, and return whether it was not there already.

    Raises:
        ConfigError: the folder cannot be written in, or a file of that name is another's.
    """
    if _own_content() == CONTENT:
        return False
    try:
        write_atomically(site_file(), CONTENT)
    except OSError as error:
        raise _refusal(error) from error
    return True


def disable() -> bool:
    """Remove the file, and return whether there was one. The folder is then as it was.

    Raises:
        ConfigError: it cannot be removed, or a file of that name is another's.
    """
    if _own_content() is None:
        return False
    try:
        site_file().unlink()
    except OSError as error:
        raise _refusal(error) from error
    return True


def _content() -> bytes | None:
    try:
        return site_file().read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _refusal(error) from error


def _own_content() -> bytes | None:
    """Return what the file holds; one of another version of this package counts as ours."""
    content = _content()
    if content is None or content.startswith(_MARK):
        return content
    raise ConfigError(
        f"{site_file()}: expected no file, or one that moe-optim enable wrote, got another. Move "
        "it away."
    )


def _refusal(error: OSError) -> ConfigError:
    return ConfigError(
        f"{site_file()}: expected a file that may be written, got: {error.strerror}. Call it as "
        "the owner of this environment or in a virtual environment of your own, or start scripts "
        "with `moe-optim run`, which writes nothing."
    )
