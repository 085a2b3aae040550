"""One HTML page that needs nothing else: pictures are in it, and there are no scripts."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from moe_optim.commands.console.files import write_atomically

_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1b1f24; background: #fff;
       max-width: 46rem; margin: 0 auto; padding: 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .5rem 0; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; border-bottom: 1px solid #d7dce1; }
p { margin: .5rem 0; }
img { display: block; width: 100%; max-width: 40rem; height: auto; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; }
th, td { text-align: left; vertical-align: top; padding: .25rem .75rem .25rem 0;
         border-bottom: 1px solid #eaedf0; }
th { font-weight: 600; white-space: nowrap; }
.wide { overflow-wrap: normal; }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.note { color: #57606a; font-size: .9rem; }
.warning { background: #fff4d6; border-left: 4px solid #d29922; padding: .25rem .75rem; }
"""


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A PNG."""

    name: str
    """Of its file, without the suffix."""
    png: bytes
    alt: str
    """What it shows, for who cannot see it."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of text; without a header the first column names the rows."""

    rows: Sequence[Sequence[str]]
    header: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Section:
    """What stands under one heading, in this order."""

    title: str
    text: Sequence[str] = ()
    warnings: Sequence[str] = ()
    table: Table | None = None
    pictures: Sequence[Picture] = ()
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Page:
    """A report."""

    title: str
    subtitle: str
    sections: Sequence[Section] = field(default=())

    def html(self) -> str:
        """Return the whole document; everything that came from a run is escaped."""
        body = "\n".join(map(_section, self.sections))
        return (
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{escape(self.title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
            f"<h1>{escape(self.title)}</h1>\n<p>{escape(self.subtitle)}</p>\n{body}\n"
            "</body>\n</html>\n"
        )

    def write(self, folder: Path) -> Path:
        """Write ``index.html`` and every picture as a file beside it; return the former."""
        folder.mkdir(parents=True, exist_ok=True)
        for section in self.sections:
            for picture in section.pictures:
                write_atomically(folder / f"{picture.name}.png", picture.png)
        path = folder / "index.html"
        write_atomically(path, self.html().encode())
        return path


def _section(section: Section) -> str:
    parts = [f"<h2>{escape(section.title)}</h2>"]
    parts += [f"<p>{escape(text)}</p>" for text in section.text]
    parts += [f'<p class="warning">{escape(warning)}</p>' for warning in section.warnings]
    if section.table is not None:
        parts.append(_table(section.table))
    parts += [_picture(picture) for picture in section.pictures]
    if section.note:
        parts.append(f'<p class="note">{escape(section.note)}</p>')
    return f"<section>\n{'\n'.join(parts)}\n</section>"


def _picture(picture: Picture) -> str:
    data = base64.b64encode(picture.png).decode()
    return f'<img alt="{escape(picture.alt)}" src="data:image/png;base64,{data}">'


def _table(table: Table) -> str:
    """Return a table; one of numbers scrolls sideways where it is too wide, others fold."""
    head = "".join(f"<th>{escape(name)}</th>" for name in table.header)
    rows = []
    for first, *rest in table.rows:
        cells = "".join(_cell(text, is_number=bool(table.header)) for text in rest)
        rows.append(f"<tr><th>{escape(first)}</th>{cells}</tr>")
    head = f"<thead><tr>{head}</tr></thead>" if head else ""
    frame = '<div class="wide">' if head else "<div>"
    return f"{frame}<table>{head}<tbody>{''.join(rows)}</tbody></table></div>"


def _cell(text: str, *, is_number: bool) -> str:
    return f'<td class="number">{escape(text)}</td>' if is_number else f"<td>{escape(text)}</td>"
