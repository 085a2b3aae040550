"""Pictures that commands draw."""

import argparse
import io
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = (".png", ".svg", ".pdf", ".jpg", ".jpeg")
"""Suffixes of pictures that can be drawn."""


def picture_path(text: str) -> Path:
    """Return the path of a picture; a type for argparse.

    Raises:
        argparse.ArgumentTypeError: the name has another suffix than :data:`KINDS`.
    """
    path = Path(text)
    if path.suffix.lower() not in KINDS:
        raise argparse.ArgumentTypeError(
            f"expected a name that ends in {', '.join(KINDS[:-1])} or {KINDS[-1]}, got '{text}'"
        )
    return path


def plain(text: str) -> str:
    """Escape the signs of matplotlib's mathematics."""
    return text.replace("$", r"\$")


def picture_of(figure: "Figure", path: Path) -> bytes:
    """Return a figure as the content of a picture of the kind that ``path`` ends in."""
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix[1:].lower())
    return picture.getvalue()


def png_of(figure: "Figure") -> bytes:
    """Return a figure as the content of a PNG."""
    return picture_of(figure, Path("figure.png"))
