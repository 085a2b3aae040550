"""Generated blocks of the documents, from the code or from measurements.

A document marks a block::

    <!-- generated: knobs -->
    ... replaced by the text of BLOCKS["knobs"] ...
    <!-- end -->

``python -m tools.documents``, which ``make docs`` runs, rewrites all blocks and plots.
``tests/test_documents.py`` fails if one is out of date.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tools.documents.api_reference import API_BLOCKS
from tools.documents.code_tables import CODE_TABLES
from tools.documents.measured_tables import MEASURED_TABLES
from tools.documents.pictures import PICTURES, is_current, write_picture
from tools.documents.results_index import measured_line, results_index
from tools.documents.scale_rules import scale_rules
from tools.documents.upstream_threads import THREAD_TABLES

ROOT = Path(__file__).parents[2]
FOLDERS = (".", "docs", "examples", "recipes", "patches", "moe_optim")
"""Folders of documents: the root itself, and all levels of the others."""

BLOCKS: Mapping[str, Callable[[], str]] = {
    **CODE_TABLES,
    **MEASURED_TABLES,
    **THREAD_TABLES,
    **API_BLOCKS,
    "results": results_index,
    "scale-rules": scale_rules,
}
"""Name of a block -> function that returns its text."""

_BLOCK = re.compile(r"<!-- generated: (?P<name>[a-z0-9-]+) -->\n(?P<text>.*?)<!-- end -->", re.S)


def documents() -> Iterator[Path]:
    for folder in FOLDERS:
        pattern = "*.md" if folder == "." else "**/*.md"
        yield from sorted((ROOT / folder).glob(pattern))


def blocks_in(text: str) -> list[str]:
    return [match["name"] for match in _BLOCK.finditer(text)]


def regenerated(text: str) -> str:
    """Return a document with all of its blocks regenerated.

    Raises:
        KeyError: an unknown block.
    """
    return _BLOCK.sub(
        lambda match: (
            f"<!-- generated: {match['name']} -->\n\n{made(match['name'])}\n\n<!-- end -->"
        ),
        text,
    )


def made(block: str) -> str:
    """Return the text of a block; for a table of measurements, including their source."""
    text = BLOCKS[block]()
    line = measured_line(block) if "| --- |" in text else ""
    return f"{text}\n\n{line}" if line else text


def main() -> None:
    """Rewrite every outdated document and plot, and print their names."""
    for path in documents():
        old = path.read_text(encoding="utf-8")
        new = regenerated(old)
        if new != old:
            path.write_text(new, encoding="utf-8")
            print(path.relative_to(ROOT))
    for name in PICTURES:
        if not is_current(name):
            print(write_picture(name).relative_to(ROOT))
