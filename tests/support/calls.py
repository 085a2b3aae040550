"""Who raises which of our errors and who communicates, as far as sources tell.

Calls are followed where the source alone says who is called: functions and classes by their names,
and methods of ``self`` and ``cls``. Callbacks and methods of other objects are not.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from tools.documents.public_names import Definition, Function, Name, definitions, find, imports

ERRORS = ("ConfigError", "LayoutError", "NonFiniteError", "PatchError", "StateError")
COLLECTIVES = re.compile(
    r"(?:dist|distributed)\.(?:all_|reduce|broadcast|gather|scatter|barrier|send|recv)"
)


@dataclass(frozen=True)
class _Place:
    """A function, and where its names are looked up."""

    module: str
    node: Function
    owner: ast.ClassDef | None


def errors_of(name: Name) -> set[str]:
    """Return which of our errors a function raises: itself, or by what it calls directly.

    Private functions belong to who calls them, however deep.
    """
    assert isinstance(name.node, Function)
    own = _Place(name.module, name.node, name.owner)
    places = [inner for one in (own, *_callees(own)) for inner in _with_private(one)]
    return {error for place in places for error in _raised(place.node)}


def communicates(name: Name) -> bool:
    """Whether a function, or anything it is known to call, calls a collective of torch."""
    assert isinstance(name.node, Function)
    places = [_Place(name.module, name.node, name.owner)]
    for place in places:  # which grows
        if COLLECTIVES.search(ast.unparse(place.node)):
            return True
        places += [callee for callee in _callees(place) if callee not in places]
    return False


def _with_private(place: _Place) -> Iterator[_Place]:
    places = [place]
    for one in places:  # which grows
        yield one
        places += [c for c in _callees(one) if _is_private(c) and c not in places]


def _is_private(place: _Place) -> bool:
    return place.node.name.startswith("_")


def _raised(node: Function) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Raise) and isinstance(inner.exc, ast.Call):
            raised = ast.unparse(inner.exc.func).rpartition(".")[2]
            if raised in ERRORS:
                yield raised


@cache
def _callees(place: _Place) -> tuple[_Place, ...]:
    calls = (n.func for n in ast.walk(place.node) if isinstance(n, ast.Call))
    return tuple(found for call in calls for found in _called(place, call))


def _called(place: _Place, call: ast.expr) -> Iterator[_Place]:
    """Yield what a call runs, as far as names tell."""
    if isinstance(call, ast.Name):
        yield from _by_name(place.module, call.id, place.owner)
    elif isinstance(call, ast.Attribute) and isinstance(call.value, ast.Name):
        base = call.value.id
        if base in ("self", "cls") and place.owner:
            yield from _method(place.module, place.owner, call.attr)
        elif imports(place.module).get(base, ("", ""))[1] is None:
            yield from _by_name(imports(place.module)[base][0], call.attr, None)
        else:
            for module, _, node in _lookup(place.module, base):
                if isinstance(node, ast.ClassDef):
                    yield from _method(module, node, call.attr)


def _by_name(module: str, name: str, owner: ast.ClassDef | None) -> Iterator[_Place]:
    if name == "cls" and owner:
        yield from _construction(module, owner)
    for found, _, node in _lookup(module, name):
        if isinstance(node, Function):
            yield _Place(found, node, None)
        elif isinstance(node, ast.ClassDef):
            yield from _construction(found, node)


def _lookup(module: str, name: str) -> Iterator[tuple[str, str, Definition]]:
    if name in definitions(module) or imports(module).get(name, ("", None))[1]:
        yield find(module, name)


def _construction(module: str, node: ast.ClassDef) -> Iterator[_Place]:
    yield from _method(module, node, "__init__")
    yield from _method(module, node, "__post_init__")


def _method(module: str, node: ast.ClassDef, name: str) -> Iterator[_Place]:
    for member in node.body:
        if isinstance(member, Function) and member.name == name:
            yield _Place(module, member, node)
