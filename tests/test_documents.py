"""Documents say what the code and the measurements say, and lead where they say they lead."""

import ast
import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from moe_optim.commands.cli.main import build_parser
from tests.support.ranks import run_ranks
from tools.documents import measured_tables
from tools.documents.blocks import BLOCKS, ROOT, blocks_in, documents, regenerated
from tools.documents.pictures import PICTURES, is_current
from tools.documents.upstream_threads import PLACES, VERDICTS, threads

README = (ROOT / "README.md").read_text(encoding="utf-8")
MOST_WORDS = 700
DOCUMENTS = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in documents()}
LINK = re.compile(r"\]\(([^)#]*)(?:#([^)]+))?\)")
NAMED_TEST = re.compile(r"`(tests/[\w/]*test_\w+\.py)(?:::(\w+))?`")


def test_regenerating_changes_nothing():
    """Where this fails: ``make docs``."""
    assert [name for name, text in DOCUMENTS.items() if regenerated(text) != text] == []
    assert {block for text in DOCUMENTS.values() for block in blocks_in(text)} == set(BLOCKS)
    assert [name for name in PICTURES if not is_current(name)] == []


def test_links_anchors_and_named_tests_exist():
    lost = [
        f"{name}: {link}#{anchor or ''}"
        for name, text in DOCUMENTS.items()
        for link, anchor in LINK.findall(text)
        if not leads_somewhere(name, link, anchor)
    ]
    lost += [
        f"{name}: {file}::{function}"
        for name, text in DOCUMENTS.items()
        for file, function in NAMED_TEST.findall(text)
        if not (ROOT / file).is_file() or (function and function not in functions_in(file))
    ]
    assert lost == []


@cache
def functions_in(file):
    """Return the names of the functions and methods of a file."""
    tree = ast.parse(Path(ROOT, file).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_a_verdict_on_what_a_thread_describes_has_its_evidence():
    """Tests, all by name, or results; and a place where they ran. What is missing has neither."""
    rows = [row for rows in threads().values() for row in rows]
    assert len({row["what"] for row in rows}) == len(rows)
    for row in rows:
        assert row.keys() <= {"what", "here", "note", "shown", "ran"}, row
        assert row["here"] in VERDICTS and set(row.get("ran", ())) <= set(PLACES), row
        has_evidence = row["here"] in ("works", "partly", "refused")
        assert has_evidence == bool(row.get("shown")) == bool(row.get("ran")), row
        for name in row.get("shown", ()):
            assert name.endswith(".json") or NAMED_TEST.fullmatch(f"`{name}`")[2], name


def leads_somewhere(document, link, anchor):
    if "://" in link:
        return True
    target = (ROOT / document).parent / link if link else ROOT / document
    if not target.exists() or not anchor:
        return target.exists()
    if target.suffix == ".py":  # the name of a test
        return anchor in functions_in(target)
    return anchor in anchors(target.read_text(encoding="utf-8"))


def anchors(text):
    """Return what may follow # in a link to a document, as GitHub makes it of headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands_in(text):
    """Yield the arguments of each ``moe-optim`` in code blocks; what has brackets is a synopsis."""
    for block in re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S):
        for line in block.replace("\\\n", " ").splitlines():
            match = re.match(r"(?:\$ |torchrun .* )?(?:\.venv/bin/)?moe-optim (.*)", line.strip())
            if match and "[" not in line:
                yield shlex.split(match[1].partition(" #")[0].partition(" |")[0])


def test_commands_parse():
    commands = [argv for text in DOCUMENTS.values() for argv in commands_in(text)]
    for argv in commands:
        build_parser().parse_args([arg for arg in argv if arg != "..."])
    assert {"doctor", "train", "run"} <= {argv[0] for argv in commands_in(README)}


def test_the_readme_is_short():
    assert len(README.split()) <= MOST_WORDS


def test_the_code_of_the_readme_runs():
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", README, re.M | re.S))
    code += "\nassert (values - weights).abs().max() < 0.5\n"
    run_ranks(1, exec, code, {})


def test_published_recipes_in_a_format_without_a_column_are_not_left_out(monkeypatch):
    total = {"source": "Megatron-Bridge", "kept": "another", "recipes": 1, "settings": {}}
    monkeypatch.setattr(measured_tables, "read_result", lambda _: {"totals": [total]})
    with pytest.raises(ValueError, match="expected formats of KEPT_IN, got {'another'}"):
        measured_tables.published()
