"""Pictures that commands draw."""

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def png_of(figure: "Figure") -> bytes:
    """Return a figure as the bytes of a PNG."""
    png = io.BytesIO()
    figure.savefig(png, format="png")
    return png.getvalue()
