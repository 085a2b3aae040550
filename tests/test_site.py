"""``make site``: a page for every document and every public name, and nothing from elsewhere.

The build is strict: a link or a name in a docstring that leads nowhere fails it.
"""

import html
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from urllib.parse import unquote, urlsplit

import pytest

import moe_optim
from tools.documents.blocks import ROOT, documents

pytestmark = [  # looked for and not imported here: the build does, in a process of its own
    pytest.mark.slow,
    pytest.mark.skipif(not find_spec("megatron"), reason="docstrings of subclasses of Megatron's"),
]

LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}
"""What a browser fetches by itself, by tag."""


class PageParser(HTMLParser):
    """Collects what a page fetches, where its links lead, and what can be led to."""

    def __init__(self, text):
        super().__init__()
        self.loaded, self.links, self.ids = [], [], set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.ids.add(given.get("id"))
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag in LOADED and LOADED[tag] in given:
            self.loaded.append(given[LOADED[tag]])


def build(source, into):
    """Build as ``make site`` does."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (options,) = re.findall(r"-m sphinx (.*) \. site$", makefile, re.M)
    options = options.replace("docs/sphinx", str(ROOT / "docs/sphinx"))
    options = options.replace("build/doctrees", str(into / "doctrees"))
    command = [sys.executable, "-m", "sphinx", *options.split(), str(source), str(into / "site")]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    built = build(ROOT, folder)
    assert built.returncode == 0, built.stderr[-3000:]
    return folder / "site"


@pytest.fixture(scope="module")
def pages(site):
    return {path: PageParser(path.read_text(encoding="utf-8")) for path in site.glob("**/*.html")}


def test_every_document_has_a_page_and_the_index_leads_home(site, pages):
    real = {path.resolve().relative_to(ROOT) for path in documents()}
    settings = {path for path in real if path.parts[:2] == ("docs", "sphinx")}
    assert {site / path.with_suffix(".html") for path in real - settings} <= pages.keys()
    assert pages[site / "index.html"].links == ["docs/README.html"]


def test_every_page_is_reached_from_the_home(site, pages):
    """By the navigation, which all pages have."""
    home = site / "docs" / "README.html"
    linked = {(home.parent / urlsplit(link).path).resolve() for link in pages[home].links}
    tools = {site / f"{name}.html" for name in ("index", "search", "genindex", "py-modindex")}
    assert pages.keys() - linked - tools - {home} == set()


def test_every_public_name_can_be_linked_to(pages):
    found = {one for page in pages.values() for one in page.ids}
    names = {f"moe_optim.{name}" for name in moe_optim.__all__ if name != "__version__"}
    assert {name for name in names if not {name, errors_name(name)} & found} == set()


def errors_name(name):
    return name.replace("moe_optim.", "moe_optim.errors.")


def test_every_link_within_the_site_leads_to_a_file_and_an_anchor(site, pages):
    broken = []
    for page, parsed in pages.items():
        for link in parsed.links:
            there = urlsplit(link)
            if there.scheme:
                continue
            target = (page.parent / unquote(there.path)).resolve() if there.path else page
            anchor = unquote(there.fragment)
            if not target.is_file() or (
                anchor and target in pages and anchor not in pages[target].ids
            ):
                broken.append(f"{page.relative_to(site)}: {link}")
    assert broken == []


def test_nothing_is_fetched_from_elsewhere(site, pages):
    """By pages, their styles and their scripts."""
    assert any(parsed.loaded for parsed in pages.values()) and list(site.glob("**/*.css"))
    for page, parsed in pages.items():
        for link in parsed.loaded:
            there = urlsplit(link)
            assert not there.scheme and not there.netloc, f"{page.name}: {link}"
            here = page.parent / unquote(there.path) if there.path else page
            assert here.is_file(), f"{page.name}: {link}"
    for style in site.glob("**/*.css"):
        fetched = re.findall(r"@import|url\((?!['\"]?data:)([^)]*)\)", style.read_text())
        assert [one for one in fetched if not (style.parent / one.strip("'\"")).is_file()] == []
    for script in site.glob("**/*.js"):
        text = script.read_text(encoding="utf-8")
        assert not re.search(r"(?:fetch|import|open|src ?=)\s*\(?\s*['\"`](?:https?:)?//", text)


def test_the_search_index_has_documents_docstrings_and_names(site):
    text = (site / "searchindex.js").read_text(encoding="utf-8")
    index = json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))
    assert found_in(index, "nvfp4") >= {"docs/formats", "docs/api/formats"}
    assert "docs/api/calibration" in found_in(index, "amax")
    assert "quantize" in {entry[-1] for entry in index["objects"]["moe_optim"]}


def found_in(index, term):
    places = index["terms"].get(term, [])
    return {index["docnames"][one] for one in ([places] if isinstance(places, int) else places)}


def test_a_result_and_a_field_keep_what_stands_before_a_colon(site):
    """Napoleon takes it for a type."""
    said = {
        "quantizing": "The buffers, on the device of the weights: one record",
        "checkpoints": "Rows of gate and of linear blocks that alternate in fc1; 0: all gate rows",
    }
    for page, words in said.items():
        text = html.unescape((site / f"docs/api/{page}.html").read_text(encoding="utf-8"))
        assert words in re.sub(r"\s+", " ", text)


def test_what_leads_nowhere_fails_the_build(tmp_path):
    """Each of them by its name."""
    lost = ("no-such-page.md", "glossary.md#no-such-anchor", "no_such_function")
    source = tmp_path / "docs"
    source.mkdir()
    (source / "glossary.md").write_text("# Glossary\n", encoding="utf-8")
    links = "".join(f"[it]({one})\n" for one in lost[:2])
    role = f"```{{eval-rst}}\n:func:`{lost[2]}`\n```\n"
    (source / "README.md").write_text(f"# Home\n\n{links}\n{role}", encoding="utf-8")
    built = build(tmp_path, tmp_path)
    assert built.returncode != 0
    assert [one for one in lost if one.partition("#")[2] not in built.stderr] == []
