"""What is on the pages of ``docs/api`` says what its users have to know, and all of it is there.

The rules read sources: whom a callback or a method of another object calls, they do not see.
"""

import ast
import re
from collections.abc import Iterator

import pytest

import moe_optim
from tests.support.calls import communicates, errors_of
from tools.documents.public_names import (
    PAGES,
    Name,
    directives,
    entries,
    names_in,
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
NEVER = {
    ("moe_optim.ops.dequantize", "LayoutError"): "a QuantizedWeight has been checked",
    ("moe_optim.formats.reference.dequantizing.dequantize", "LayoutError"): "likewise",
}
"""What callees raise for arguments that these functions never give them."""


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


def unannounced_errors(name: Name) -> Iterator[str]:
    """Errors that a function raises itself, or by what it calls directly, are under Raises."""
    text = sections(name.doc)[""]
    if name.is_function and not re.search(r"[Ee]rrors are those of", text) and not delegates(text):
        never = {error for path, error in NEVER if path == name.path}
        announced = set(entries(sections(name.doc).get("Raises", "")))
        yield from sorted(errors_of(name) - announced - never)


def unsaid_ranks(name: Name) -> Iterator[str]:
    """What communicates, or is given groups or model chunks, says who has to call it."""
    if not name.is_function or RANKS.search(" ".join(name.doc.split())):
        return
    if communicates(name) or OF_MANY_RANKS & set(parameters(name.node)):
        yield "not said whether every rank must call it"


def delegates(doc: str) -> bool:
    """Return whether a docstring says that arguments are those of another function."""
    return bool(re.search(r"[Aa]rguments[^.]* those of", doc))


RULES = (undocumented, unexplained_parameters, untold_tensors, unannounced_errors, unsaid_ranks)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_everything_public_is_documented(rule):
    assert [f"{name.path}: {fault}" for name in NAMES for fault in rule(name)] == []


def test_exceptions_are_still_needed():
    errors = {name.path: errors_of(name) for name in NAMES if name.is_function}
    assert all(error in errors[path] for path, error in NEVER)


def test_every_name_of_the_package_is_on_a_page():
    pages = [page.read_text(encoding="utf-8") for page in PAGES.glob("*.md")]
    shown = {name for text in pages for _, name, _ in directives(text)}
    shown |= {name.path.replace(".errors.", ".") for name in NAMES}
    exported = {f"moe_optim.{name}" for name in moe_optim.__all__ if name != "__version__"}
    assert exported <= shown


BAD = '''
import torch.distributed as dist

def undocumented():
    pass

def unexplained_parameters(a, b):
    """Take ``a``."""

def untold_tensors(a: Tensor) -> Tensor:
    """Return something.

    Args:
        a: a tensor of bf16.
    """

def unannounced_errors():
    """Refuse everything."""
    _refuse()

def _refuse():
    raise LayoutError("no")

def unsaid_ranks():
    """Add up."""
    _add()

def _add():
    dist.all_reduce(None)
'''


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_rule_finds_what_breaks_it_and_nothing_else(rule):
    found = {name.own_name: list(rule(name)) for name in names_in(BAD)}
    assert [name for name, faults in found.items() if faults] == [rule.__name__]
