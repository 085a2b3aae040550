"""How ``make site`` makes a site of the Markdown of this repository.

Sphinx reads the repository as it is: links between documents lead from page to page, and files that
are no documents are copied beside them. A link that leads nowhere fails the build.
"""

import re
import sys
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from moe_optim.version import VERSION  # noqa: E402

project = "moe_optim"
version = release = VERSION

root_doc = "docs/README"
include_patterns = [
    "*.md",
    "docs/*.md",
    "docs/api/*.md",
    "examples/*.md",
    "patches/**.md",
    "recipes/**.md",
    "moe_optim/**.md",
]
exclude_patterns = [
    *(".*", "build", "dist", "runs", "site", "tests"),
    *("moe_optim/config/recipe_files", "moe_optim/integration"),  # links to folders that are read
]
_NAVIGATION = ROOT / "docs/sphinx/navigation.md"

highlight_language = "none"  # where a block does not say
smartquotes_action = "qe"  # leaves the dashes of --flags
extensions = ["myst_parser"]
myst_heading_anchors = 6

html_theme = "furo"
html_title = f"moe_optim {VERSION}"
html_copy_source = False
html_show_copyright = html_show_sphinx = False
html_static_path = ["static"]
html_css_files = ["site.css"]
html_additional_pages = {"index": "redirect.html"}
templates_path = ["templates"]


def add_navigation(_app: Sphinx, docname: str, source: list[str]) -> None:
    """Let the home have the table of all pages, which no document needs where it is read alone."""
    if docname == root_doc:
        source[0] += "\n" + _NAVIGATION.read_text(encoding="utf-8")


def fit_phones(_app: Sphinx, doctree: nodes.document, _docname: str) -> None:
    """Mark cells of text, and let long names break at their parts."""
    for title in doctree.findall(nodes.title):
        for text in list(title.findall(nodes.Text)):
            broken = re.sub(r"(?<=\w)[._](?=\w)", "\\g<0>\u200b", text)
            text.parent.replace(text, nodes.Text(broken))
    for cell in doctree.findall(nodes.entry):
        if len(cell.astext()) > 24:
            cell["classes"].append("prose")
    for code in doctree.findall(nodes.literal):
        if max(map(len, code.astext().split()), default=0) > 32:
            code["classes"].append("long")
            parts = re.split(r"(?<=[/_:.])(?=\w)", code.astext())
            code.clear()
            for part in parts:
                code += [nodes.Text(part), nodes.raw("", "<wbr>", format="html")]


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", add_navigation)
    app.connect("doctree-resolved", fit_phones)
