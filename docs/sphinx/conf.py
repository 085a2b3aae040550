"""How ``make site`` makes a site of the Markdown of this repository and of its docstrings.

Sphinx reads the repository as it is: links between documents lead from page to page, and files that
are no documents are copied beside them. A link that leads nowhere fails the build.
"""

import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from docutils.nodes import Element
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Megatron is imported, not run
logging.getLogger("megatron").setLevel(logging.WARNING)
warnings.filterwarnings("ignore", module="megatron")

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
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 6
autodoc_default_options = {"members": True, "member-order": "bysource"}
autoclass_content = "both"
autodoc_typehints_format = "short"
python_display_short_literal_types = True
python_maximum_signature_line_length = 80
toc_object_entries_show_parents = "hide"
nitpicky = True
nitpick_ignore_regex = [("py:class", ".*")]  # types of torch and of Python have no page here

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


def keep_colons(_app: Sphinx, what: str, _name: str, _: Any, __: Any, lines: list[str]) -> None:
    """Keep Napoleon from taking what stands before a colon for the type of a result or a field."""
    nothing = "\\ "  # in reStructuredText
    if what in ("attribute", "data", "property"):
        lines.insert(0, nothing)
    for number in [i for i, line in enumerate(lines) if line in ("Returns:", "Yields:")][::-1]:
        lines.insert(number + 1, f"    {nothing}")


def find_by_last_name(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, text: Element
) -> Element | None:
    """Lead to what a docstring calls by its name alone, or by the module that defines it."""
    if node.get("refdomain") != "py":
        return None
    python, docname, kind = env.domains.python_domain, node["refdoc"], node["reftype"]
    name = node["reftarget"].rpartition(".")[2]
    kinds = python.objtypes_for_role(kind, [])
    found = [
        full
        for full, entry in python.objects.items()
        if full.rpartition(".")[2] == name and entry.objtype in kinds
    ]
    if not found:
        return None
    shortest = min(found, key=len)  # moe_optim.quantize, not moe_optim.formats.reference.quantize
    return python.resolve_xref(env, docname, app.builder, kind, shortest, node, text)


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", add_navigation)
    app.connect("autodoc-process-docstring", keep_colons, priority=400)  # Napoleon has 500
    app.connect("missing-reference", find_by_last_name)
