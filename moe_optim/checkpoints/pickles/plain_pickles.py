"""Reading a pickle without calling anything that it names.

A pickle is a program: its operations build values on a stack, and some call what others have named.
Python's unpicklers carry that out. Here a name stays a :class:`Named` and a call of it a
:class:`Made`, so that no pickle runs code, and nothing is imported. What is left to bound is memory
and time: both are proportional to the length of the pickle. Operations that no checkpoint has are
refused, as are memo places beyond its length, numbers of more than 2040 bits, and dict keys whose
hash would take longer than they are long (tuples of tuples, shared).
"""

import pickle
import struct
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Named:
    """A class, a function or a dtype that a pickle names."""

    module: str
    name: str

    def __str__(self) -> str:
        text = f"{self.module}.{self.name}"[:200]
        return text if text.isprintable() else repr(text)


@dataclass(slots=True, eq=False)
class Made:
    """What a pickle has something named make: an object, of which the words are kept."""

    by: Named
    args: tuple[Any, ...]
    state: Any = None
    """What its attributes are to be; None if nothing was said."""

    def __repr__(self) -> str:
        return f"<{self.by}>"  # arguments may hold others, and these again others


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """What a pickle says to lie elsewhere, such as the bytes of a tensor."""

    words: Any


_SIZE = Named("torch", "Size")
_ORDERED_DICT = Named("collections", "OrderedDict")
_ENCODE, _OF_BYTES = Named("_codecs", "encode"), (("latin1",), ("latin-1",))
_ATOMS = (str, bytes, int, float, bool, type(None), Named, Made, Stored)
_LONGEST_KEY = 16


def read_pickle(content: bytes, admit: Callable[[Named], None] = lambda _: None) -> Any:
    """Return what a pickle holds: plain values, ``Named``, ``Made`` and ``Stored``.

    ``torch.Size`` is a tuple and ``OrderedDict`` a dict. Items and elements that are put into a
    ``Made`` are dropped: what its class means by them is not known.

    Args:
        content: of protocol 2 or later.
        admit: is called with each name, and may raise to refuse it.

    Raises:
        ValueError: it is cut off, or no pickle that a checkpoint has.
    """
    machine = _Machine(content, admit)
    try:
        return machine.run()
    except (IndexError, KeyError, TypeError, struct.error) as error:
        raise ValueError(f"no pickle of a checkpoint, at byte {machine.at:,}") from error


class _Machine:
    """Stack, marks and memo while a pickle is read; each operation is a function of it."""

    def __init__(self, content: bytes, admit: Callable[[Named], None]) -> None:
        self.content = content
        self.at = 0
        self.protocol = 0
        self.admit = admit
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # stacks under the marks
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        content, operations, stop = self.content, _OPERATIONS, pickle.STOP[0]
        while (code := content[self.at]) != stop:
            self.at += 1
            operations[code](self)
        if len(self.stack) != 1 or self.below:
            raise TypeError("an end with more or less than one value")
        return self.stack[0]

    def byte(self) -> int:
        self.at += 1
        return self.content[self.at - 1]

    def announce(self) -> None:
        self.protocol = self.byte()

    def number(self, form: struct.Struct) -> Any:
        (value,) = form.unpack_from(self.content, self.at)
        self.at += form.size
        return value

    def take(self, count: int) -> bytes:
        start, self.at = self.at, self.at + count
        if self.at > len(self.content):
            raise ValueError("a pickle that is cut off")
        return self.content[start : self.at]

    def line(self) -> str:
        return self.take(self.content.index(b"\n", self.at) + 1 - self.at)[:-1].decode()

    def top(self, count: int) -> tuple[Any, ...]:
        """Take the last values off the stack."""
        values = tuple(self.stack[-count:])
        if len(values) < count:
            raise IndexError("a stack without as many values")
        del self.stack[-count:]
        return values

    def mark(self) -> None:
        self.below.append(self.stack)
        self.stack = []

    def from_mark(self) -> list[Any]:
        """Take all values off the stack down to the last mark, and the mark."""
        values, self.stack = self.stack, self.below.pop()
        return values

    def tuple_from_mark(self) -> None:
        values = self.from_mark()
        self.stack.append(tuple(values))

    def memoize(self) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def put(self, place: int) -> None:
        if place > len(self.content):  # other unpicklers reserve memory for all places before
            raise ValueError(f"memo place {place:,} in a pickle of {len(self.content):,} bytes")
        self.memo[place] = self.stack[-1]

    def name(self, module: Any, name: Any) -> None:
        if not (isinstance(module, str) and isinstance(name, str)):
            raise TypeError("a name that is no text")
        if self.protocol < 3:  # which has the names of Python 2
            module, name = NAME_MAPPING.get((module, name), (module, name))
            module = IMPORT_MAPPING.get(module, module)
        named = Named(module, name)
        self.admit(named)
        self.stack.append(named)

    def make(self) -> None:
        by, args = self.top(2)
        if not (isinstance(by, Named) and isinstance(args, tuple)):
            raise TypeError("a call of what was not named")
        if by == _ENCODE and args[1:] not in _OF_BYTES:  # others are looked for, and imported
            raise ValueError("text in another encoding than that of bytes")
        if by == _SIZE and isinstance(args[0], tuple):
            self.stack.append(args[0])
        elif by == _ORDERED_DICT and not args:
            self.stack.append({})
        else:
            self.stack.append(Made(by, args))

    def build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, Made):
            target.state = state
        elif not isinstance(target, dict):  # an OrderedDict may have attributes
            raise TypeError("a state of what has none")

    def append(self, values: Sequence[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, list):
            target.extend(values)
        elif not isinstance(target, Made):
            raise TypeError("elements of what has none")

    def set_items(self, values: Sequence[Any]) -> None:
        target = self.stack[-1]
        if len(values) % 2:
            raise TypeError("a key without a value")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if not isinstance(key, _ATOMS):
                _require_flat(key)
            if isinstance(target, dict):
                target[key] = value
        if not isinstance(target, dict | Made):
            raise TypeError("items of what has none")


def _require_flat(key: Any) -> None:
    """Refuse a key that is no short tuple of atoms."""
    is_short = isinstance(key, tuple) and len(key) <= _LONGEST_KEY
    if not (is_short and all(isinstance(part, _ATOMS) for part in key)):
        raise TypeError("a key whose hash is not at hand")


_SHORT, _INT, _UINT, _LONG = (struct.Struct(form) for form in ("<H", "<i", "<I", "<Q"))
_DOUBLE = struct.Struct(">d")

_OPERATIONS: dict[int, Callable[[_Machine], object]] = {
    code[0]: operation
    for code, operation in {
        pickle.PROTO: _Machine.announce,
        pickle.FRAME: lambda m: m.number(_LONG),
        pickle.NONE: lambda m: m.stack.append(None),
        pickle.NEWTRUE: lambda m: m.stack.append(True),
        pickle.NEWFALSE: lambda m: m.stack.append(False),
        pickle.BININT1: lambda m: m.stack.append(m.byte()),
        pickle.BININT2: lambda m: m.stack.append(m.number(_SHORT)),
        pickle.BININT: lambda m: m.stack.append(m.number(_INT)),
        pickle.LONG1: lambda m: m.stack.append(pickle.decode_long(m.take(m.byte()))),
        pickle.BINFLOAT: lambda m: m.stack.append(m.number(_DOUBLE)),
        pickle.SHORT_BINUNICODE: lambda m: m.stack.append(m.take(m.byte()).decode()),
        pickle.BINUNICODE: lambda m: m.stack.append(m.take(m.number(_UINT)).decode()),
        pickle.BINUNICODE8: lambda m: m.stack.append(m.take(m.number(_LONG)).decode()),
        pickle.SHORT_BINBYTES: lambda m: m.stack.append(m.take(m.byte())),
        pickle.BINBYTES: lambda m: m.stack.append(m.take(m.number(_UINT))),
        pickle.BINBYTES8: lambda m: m.stack.append(m.take(m.number(_LONG))),
        pickle.EMPTY_TUPLE: lambda m: m.stack.append(()),
        pickle.TUPLE: _Machine.tuple_from_mark,
        pickle.TUPLE1: lambda m: m.stack.append((m.stack.pop(),)),
        pickle.TUPLE2: lambda m: m.stack.append(m.top(2)),
        pickle.TUPLE3: lambda m: m.stack.append(m.top(3)),
        pickle.EMPTY_LIST: lambda m: m.stack.append([]),
        pickle.APPEND: lambda m: m.append(m.top(1)),
        pickle.APPENDS: lambda m: m.append(m.from_mark()),
        pickle.EMPTY_DICT: lambda m: m.stack.append({}),
        pickle.SETITEM: lambda m: m.set_items(m.top(2)),
        pickle.SETITEMS: lambda m: m.set_items(m.from_mark()),
        pickle.MARK: _Machine.mark,
        pickle.BINGET: lambda m: m.stack.append(m.memo[m.byte()]),
        pickle.LONG_BINGET: lambda m: m.stack.append(m.memo[m.number(_UINT)]),
        pickle.BINPUT: lambda m: m.put(m.byte()),
        pickle.LONG_BINPUT: lambda m: m.put(m.number(_UINT)),
        pickle.MEMOIZE: _Machine.memoize,
        pickle.GLOBAL: lambda m: m.name(m.line(), m.line()),
        pickle.STACK_GLOBAL: lambda m: m.name(*m.top(2)),
        pickle.REDUCE: _Machine.make,
        pickle.NEWOBJ: _Machine.make,
        pickle.BUILD: _Machine.build,
        pickle.BINPERSID: lambda m: m.stack.append(Stored(m.stack.pop())),
    }.items()
}
