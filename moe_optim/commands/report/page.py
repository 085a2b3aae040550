"""Renders a page and writes it with its plots."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_optim.commands.console.files import write_atomically


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A PNG."""

    name: str
    """File name without suffix."""
    png: bytes
    alt: str

    @property
    def url(self) -> str:
        """Data URL of the PNG."""
        return f"data:image/png;base64,{base64.b64encode(self.png).decode()}"


def render(template: str, **context: Any) -> str:
    """Render a template; every value of ``context`` is escaped."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("moe_optim.commands.report"),
        autoescape=True,
        trim_blocks=True,
        undefined=StrictUndefined,
    )
    return environment.get_template(template).render(context)


def write_page(folder: Path, html: str, pictures: Sequence[Picture]) -> Path:
    """Write ``index.html`` and every plot as a file beside it; return the path of the page."""
    folder.mkdir(parents=True, exist_ok=True)
    for picture in pictures:
        write_atomically(folder / f"{picture.name}.png", picture.png)
    path = folder / "index.html"
    write_atomically(path, html.encode())
    return path
