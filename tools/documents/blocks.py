"""Tables of the documents that repeat the code or a measurement: written from it, and held to it.

A document marks where one goes::

    <!-- generated: knobs -->
    ... replaced by what BLOCKS["knobs"] makes ...
    <!-- end -->

``python -m tools.documents`` rewrites all of them, and the pictures; ``make docs`` calls
it. ``tests/test_documents.py`` fails where rewriting would change something.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tools.documents.code_tables import CODE_TABLES
from tools.documents.measured_tables import MEASURED_TABLES
from tools.documents.pictures import PICTURES, is_current, write_picture
from tools.documents.results_index import measured_line, results_index

ROOT = Path(__file__).parents[2]
FOLDERS = (".", "docs", "examples", "recipes", "patches", "moe_optim")
"""Where documents lie: beside each other at the root, and anywhere below the others."""

BLOCKS: Mapping[str, Callable[[], str]] = {
    **CODE_TABLES,
    **MEASURED_TABLES,
    "results": results_index,
}
"""Name of a block -> what makes its text."""

_BLOCK = re.compile(r"<!-- generated: (?P<name>[a-z0-9-]+) -->\n(?P<text>.*?)<!-- end -->", re.S)


def documents() -> Iterator[Path]:
    """Yield every Markdown file of the repository."""
    for folder in FOLDERS:
        pattern = "*.md" if folder == "." else "**/*.md"
        yield from sorted((ROOT / folder).glob(pattern))


def blocks_in(text: str) -> list[str]:
    """Return the names of the blocks of a document, in their order."""
    return [match["name"] for match in _BLOCK.finditer(text)]


def regenerated(text: str) -> str:
    """Return a document with all of its blocks made anew.

    Raises:
        KeyError: a block of a name that nothing makes.
    """
    return _BLOCK.sub(
        lambda match: (
            f"<!-- generated: {match['name']} -->\n\n{made(match['name'])}\n\n<!-- end -->"
        ),
        text,
    )


def made(block: str) -> str:
    """Return the text of a block; below a table of measured figures, what measured them."""
    text = BLOCKS[block]()
    line = measured_line(block) if "| --- |" in text else ""
    return f"{text}\n\n{line}" if line else text


def main() -> None:
    """Rewrite every document and every picture that is not up to date, and name them."""
    for path in documents():
        old = path.read_text(encoding="utf-8")
        new = regenerated(old)
        if new != old:
            path.write_text(new, encoding="utf-8")
            print(path.relative_to(ROOT))
    for name in PICTURES:
        if not is_current(name):
            print(write_picture(name).relative_to(ROOT))
