"""The API reference as Markdown, from signatures and Google docstrings of the sources."""

import ast
import copy
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping

from tools.documents.api_pages import API
from tools.documents.public_names import Name, entries, names_of_block, sections

_ROLE = re.compile(r":(?:func|meth|class|attr|data|mod|exc):`~?([\w.]+)`")
_WIDTH = 88


def render_block(block: str) -> str:
    """Return the reference of all names of a block of :data:`API`."""
    names = list(names_of_block(block))
    return "\n\n".join(part for name in names if not name.owner for part in _entry(name, names))


def _entry(name: Name, names: list[Name]) -> Iterator[str]:
    yield f"## {name.shown}"
    yield _code(_signature(name, name.shown.rpartition(".")[2]))
    yield from _text(name.doc)
    if not isinstance(name.node, ast.ClassDef):
        return
    for builder in name.constructors:
        yield from _text(ast.get_docstring(builder) or "")
    members = [one for one in names if one.owner is name.node]
    values = [one for one in members if not one.is_function]
    if values:
        yield "Attributes:\n\n" + "\n".join(f"- {_value(one)}" for one in values)
    for one in members:
        if one.is_function:
            yield f"### {name.own_name}.{one.own_name}"
            yield _code(_signature(one, one.own_name))
            yield from _text(one.doc)


def _code(text: str) -> str:
    quoted = text if '"' in text else text.replace("'", '"')
    return f"```python\n{quoted}\n```"


def _value(name: Name) -> str:
    """Return a field, property or constant as one line."""
    node, kind = name.node, ""
    if isinstance(node, ast.AnnAssign):
        kind = ast.unparse(node.annotation).strip("'\"")
    elif isinstance(node, ast.FunctionDef) and node.returns:
        kind = ast.unparse(node.returns).strip("'\"")
    of_owner = ast.get_docstring(name.owner) or "" if name.owner else ""
    doc = name.doc or entries(sections(of_owner).get("Attributes", "")).get(name.own_name, "")
    return f"`{name.own_name}{f': {kind}' if kind else ''}`: {_line(doc)}"


def _signature(name: Name, shown: str) -> str:
    node = name.node
    if isinstance(node, ast.FunctionDef):
        kinds = [ast.unparse(one) for one in node.decorator_list]
        before = [f"@{kind}" for kind in kinds if kind in ("classmethod", "staticmethod")]
        returns = ast.unparse(node.returns) if node.returns else "None"
        return "\n".join([*before, _call(node, shown, returns)])
    if isinstance(node, ast.ClassDef):
        bases = [ast.unparse(base) for base in node.bases]
        head = f"class {node.name}({', '.join(bases)})" if bases else f"class {node.name}"
        if name.constructors:
            return f"{head}\n{_call(name.constructors[0], node.name, None)}"
        return head
    value = ast.unparse(node.value) if node.value is not None else ""
    kind = f": {ast.unparse(node.annotation)}" if isinstance(node, ast.AnnAssign) else ""
    line = f"{shown}{kind} = {value}"
    return line if len(line) <= _WIDTH else f"{shown}{kind} = ..."


def _call(node: ast.FunctionDef, shown: str, returns: str | None) -> str:
    """Return a signature, a parameter a line if it is long."""
    arguments = copy.deepcopy(node.args)
    for positional in (arguments.posonlyargs, arguments.args):
        positional[:] = [one for one in positional if one.arg not in ("self", "cls")]
    parts = [_spaced(part) for part in _split(ast.unparse(arguments)) if part]
    arrow = f" -> {returns}" if returns is not None else ""
    line = f"{shown}({', '.join(parts)}){arrow}"
    if len(line) <= _WIDTH:
        return line
    lines = textwrap.indent(",\n".join(parts), "    ")
    return f"{shown}(\n{lines},\n){arrow}"


def _spaced(parameter: str) -> str:
    """Put blanks around the default of an annotated parameter."""
    name, colon, rest = parameter.partition(": ")
    return f"{name}{colon}{rest.replace('=', ' = ', 1)}" if colon else parameter


def _split(text: str) -> list[str]:
    """Split parameters at commas outside of brackets."""
    parts, depth, start = [], 0, 0
    for index, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            parts.append(text[start:index].strip())
            start = index + 1
    return [*parts, text[start:].strip()]


def _text(doc: str) -> Iterator[str]:
    """Yield the parts of a docstring as Markdown, each paragraph in one line."""
    found = sections(doc)
    if lead := found.pop(""):
        yield from _paragraphs(lead)
    for heading, section in found.items():
        if heading == "Attributes":
            continue  # shown with the members
        body = textwrap.dedent(section).strip()
        listed = entries(section)
        if heading == "Args" or (heading == "Raises" and listed):
            lines = "\n".join(f"- `{one}`: {_line(text)}" for one, text in listed.items())
            yield f"{'Parameters' if heading == 'Args' else heading}:\n\n{lines}"
        else:
            first, *rest = _paragraphs(body)
            yield f"{heading}: {first}"
            yield from rest


def _paragraphs(text: str) -> Iterator[str]:
    for block in re.split(r"\n\s*\n", text.strip()):
        lines = block.splitlines()
        if lines and all(line.startswith("    ") for line in lines):
            yield f"```\n{textwrap.dedent(block)}\n```"
        elif any(line.startswith("- ") for line in lines):
            yield "\n".join(_items(lines))
        elif lines:
            yield _line(block).removesuffix("::") + (":" if block.endswith("::") else "")


def _items(lines: list[str]) -> Iterator[str]:
    """Yield the items of a list, and what stands before them, each in one line."""
    joined: list[str] = []
    for line in lines:
        if line.startswith("- ") or not joined:
            joined.append(line)
        else:
            joined[-1] += f" {line.strip()}"
    for line in joined:
        yield f"- {_line(line[2:])}" if line.startswith("- ") else f"{_line(line)}\n"


def _line(text: str) -> str:
    """Return reStructuredText in one line of Markdown."""
    text = " ".join(text.split())
    text = _ROLE.sub(lambda found: f"`{found[1].rpartition('.')[2]}`", text)
    return re.sub(r"``(.+?)``", r"`\1`", text)


def _maker(block: str) -> Callable[[], str]:
    return lambda: render_block(block)


API_BLOCKS: Mapping[str, Callable[[], str]] = {f"api-{block}": _maker(block) for block in API}
