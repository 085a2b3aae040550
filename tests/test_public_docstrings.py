"""What is on the pages of ``docs/api`` says what its users have to know, and all of it is there."""

import ast
import re
from collections.abc import Iterator

import pytest

import moe_optim
from tools.documents.public_names import (
    ROOT,
    Name,
    entries,
    parameters,
    public_names,
    sections,
)

NAMES = list(public_names())
SHAPE = re.compile(r"\[[^\]]*\]|shape|elements|one value|scalar", re.I)
DTYPE = re.compile(r"fp\d+|bf16|u?int\d+|integers?|dtype|floating-point|bool", re.I)
REFERS = re.compile(r":(?:func|meth|class|attr):`|``\w+\.\w+``")
RANKS = re.compile(r"every rank|all ranks|each rank|no rank|one process", re.I)
OF_MANY_RANKS = {"group", "groups", "model_chunks", "pg_collection", "reduce_max"}


def undocumented(name: Name) -> Iterator[str]:
    """Functions, classes, members, fields and constants alike."""
    of_owner = ast.get_docstring(name.owner) or "" if name.owner else ""
    if not name.doc and name.own_name not in entries(sections(of_owner).get("Attributes", "")):
        yield "no docstring"


def unexplained_parameters(name: Name) -> Iterator[str]:
    """Parameters are explained under Args, or stand in the text as ``name``."""
    for builder in [name.node] if name.is_function else name.constructors:
        docs = [name.doc, ast.get_docstring(builder) or ""]
        listed = {one for doc in docs for one in entries(sections(doc).get("Args", ""))}
        for one in parameters(builder):
            is_named = any(f"``{one}``" in doc or delegates(doc) for doc in docs)
            if one not in listed and not is_named:
                yield f"{one} is not explained"


def untold_tensors(name: Name) -> Iterator[str]:
    """Tensors have shapes and dtypes, or it is said where to read them."""
    if not name.is_function:
        return
    given = sections(name.doc)
    listed = entries(given.get("Args", ""))
    for one, annotation in parameters(name.node).items():
        if "Tensor" in annotation and not tells(listed.get(one, given[""]), name):
            yield f"{one}: no shape, or no dtype"
    result = ast.unparse(name.node.returns) if name.node.returns else ""
    if "Tensor" in result and not tells(given[""] + given.get("Returns", ""), name):
        yield "result: no shape, or no dtype"


def tells(text: str, name: Name) -> bool:
    return bool(
        REFERS.search(text) or (SHAPE.search(text) and DTYPE.search(text)) or delegates(name.doc)
    )


def unsaid_ranks(name: Name) -> Iterator[str]:
    """Functions that take groups or model chunks say which ranks have to call them."""
    if not name.is_function or RANKS.search(" ".join(name.doc.split())):
        return
    if OF_MANY_RANKS & set(parameters(name.node)):
        yield "not said whether every rank must call it"


def delegates(doc: str) -> bool:
    """Return whether a docstring says that arguments are those of another function."""
    return bool(re.search(r"[Aa]rguments[^.]* those of", doc))


RULES = (undocumented, unexplained_parameters, untold_tensors, unsaid_ranks)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_everything_public_is_documented(rule):
    assert [f"{name.path}: {fault}" for name in NAMES for fault in rule(name)] == []


def test_every_name_of_the_package_is_on_a_page():
    pages = [page.read_text(encoding="utf-8") for page in (ROOT / "docs/api").glob("*.md")]
    headings = {name for text in pages for name in re.findall(r"^## (\S+)$", text, re.M)}
    shown = {name.replace(".errors.", ".") for name in headings}
    exported = {f"moe_optim.{name}" for name in moe_optim.__all__ if name != "__version__"}
    assert exported <= shown
