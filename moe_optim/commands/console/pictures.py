"""Pictures that commands draw."""

import argparse
import io
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS: Mapping[str, str] = MappingProxyType(
    {".png": "png", ".svg": "svg", ".pdf": "pdf", ".jpg": "jpeg", ".jpeg": "jpeg"}
)
"""Endings of names -> what matplotlib calls the kind of picture."""


def picture_path(text: str) -> Path:
    """Return the path of a picture; a type for argparse.

    Raises:
        argparse.ArgumentTypeError: the name does not end as a picture's that can be drawn.
    """
    path = Path(text)
    if path.suffix.lower() not in KINDS:
        *others, last = KINDS
        raise argparse.ArgumentTypeError(
            f"expected a name that ends in {', '.join(others)} or {last}, got '{text}'"
        )
    return path


def plain(text: str) -> str:
    """Return what matplotlib draws as ``text``, which may hold signs of its mathematics."""
    return text.replace("$", r"\$")


def picture_of(figure: "Figure", path: Path) -> bytes:
    """Return a figure as the bytes of a picture of the kind that ``path`` ends in."""
    picture = io.BytesIO()
    figure.savefig(picture, format=KINDS[path.suffix.lower()])
    return picture.getvalue()


def png_of(figure: "Figure") -> bytes:
    """Return a figure as the bytes of a PNG."""
    return picture_of(figure, Path("figure.png"))
