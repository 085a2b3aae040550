"""Writes files atomically."""

import os
import secrets
from pathlib import Path

STDOUT = Path("-")  # path that stands for stdout


def write_atomically(path: Path, content: bytes) -> None:
    """Replace ``path`` by ``content``; after a crash or a full disk the old file remains.

    Of processes that call it at once, the last one's content remains.
    """
    partial = path.with_name(f".{path.name}.partial-{secrets.token_hex(4)}")
    try:
        with partial.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:  # those of a write name no file
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        partial.unlink(missing_ok=True)
