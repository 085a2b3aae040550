"""File types and encoding of plots."""

import argparse
import io
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = (".png", ".svg", ".pdf", ".jpg", ".jpeg")
"""Supported suffixes."""


def picture_path(text: str) -> Path:
    """Parse the path of a plot; an argparse ``type``.

    Raises:
        argparse.ArgumentTypeError: the suffix is not in :data:`KINDS`.
    """
    path = Path(text)
    if path.suffix.lower() not in KINDS:
        raise argparse.ArgumentTypeError(
            f"expected a name that ends in {', '.join(KINDS[:-1])} or {KINDS[-1]}, got '{text}'"
        )
    return path


def plain(text: str) -> str:
    """Escape matplotlib's mathtext characters."""
    return text.replace("$", r"\$")


def picture_of(figure: "Figure", path: Path) -> bytes:
    """Encode a figure in the file type of ``path``'s suffix."""
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix[1:].lower())
    return picture.getvalue()


def png_of(figure: "Figure") -> bytes:
    """Encode a figure as PNG."""
    return picture_of(figure, Path("figure.png"))
