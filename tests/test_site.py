"""``make site``: a page for every document and every public name, and nothing from elsewhere.

The build is strict: a link that leads nowhere fails it.
"""

import re
import subprocess
import sys
from html.parser import HTMLParser
from urllib.parse import urlsplit

import pytest

import moe_optim
from tools.documents.blocks import ROOT, documents

pytestmark = pytest.mark.slow

LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}
"""What a browser fetches by itself, by tag."""


class PageParser(HTMLParser):
    """Collects what a page fetches, and what links can lead to."""

    def __init__(self, text):
        super().__init__()
        self.loaded, self.ids = [], set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.ids.add(given.get("id"))
        if LOADED.get(tag) in given:
            self.loaded.append(given[LOADED[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build as ``make site`` does, and return the folder."""
    folder = tmp_path_factory.mktemp("site")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (options,) = re.findall(r"-m sphinx (.*) \. site$", makefile, re.M)
    options = options.replace("build/doctrees", str(folder / "doctrees")).split()
    command = [sys.executable, "-m", "sphinx", *options, ".", str(folder / "site")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[-3000:]
    return folder / "site"


def test_documents_and_public_names_have_places_and_nothing_is_fetched_from_elsewhere(site):
    pages = {
        path.relative_to(site): PageParser(path.read_text(encoding="utf-8"))
        for path in site.glob("**/*.html")
    }
    real = {path.resolve().relative_to(ROOT) for path in documents()}
    shown = {path for path in real if path.parts[:2] != ("docs", "sphinx")}
    assert {path.with_suffix(".html") for path in shown} <= pages.keys()
    found = {one for page in pages.values() for one in page.ids}
    names = {name.lower() for name in moe_optim.__all__} - {"__version__"}
    prefixes = ("moe_optim", "moe_optimerrors")  # a slug has no dots
    assert {name for name in names if not {p + name for p in prefixes} & found} == set()
    loaded = {link for page in pages.values() for link in page.loaded}
    assert loaded and not {link for link in loaded if urlsplit(link).netloc}
