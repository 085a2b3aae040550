"""Reading a pickle without calling anything that it names.

A pickle is a program: its operations build values on a stack, and some call what others have named.
Python's unpicklers carry that out. Here a name stays a :class:`Named` and a call of it a
:class:`Made`, so that no pickle runs code, and nothing is imported. What is left to bound is memory
and time: both are proportional to the length of the pickle. Operations that no checkpoint has are
refused, as are memo places far beyond its length, numbers of more than 2040 bits, and dict keys
whose hash would take longer than they are long (tuples of tuples, shared).
"""

import gc
import io
import pickle
import struct
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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


def names_of(by_module: Mapping[str, str]) -> set[Named]:
    """Return what is named: by module, names with blanks between."""
    return {Named(module, name) for module, names in by_module.items() for name in names.split()}


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
    stream = io.BytesIO(content)
    faults = EOFError, LookupError, OverflowError, TypeError, struct.error, pickle.UnpicklingError
    try:
        with no_collections():
            return _Reader(stream, len(content), admit).load()
    except faults as error:
        raise ValueError(f"no pickle of a checkpoint, before byte {stream.tell():,}") from error


@contextmanager
def no_collections() -> Iterator[None]:
    """Spare millions of values without a cycle that all of them are looked at again and again."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


_PythonsUnpickler: Any = pickle._Unpickler  # in Python, so that operations can be others


_PythonsStop: Any = pickle._Stop  # type: ignore[attr-defined]


class _Reader(_PythonsUnpickler):
    """Python's unpickler with operations that keep what others call; see ``_ADMITTED``."""

    def __init__(self, stream: io.BytesIO, length: int, admit: Callable[[Named], None]) -> None:
        super().__init__(stream)
        self._stream, self._length, self._admit = stream, length, admit

    def load(self) -> Any:
        """Carry out all operations: as Python's own, which spends most time on frames."""
        self.read, self.readline = self._stream.read, self._stream.readline
        self.metastack: list[Any] = []
        self.stack: list[Any] = []
        self.append, self.proto = self.stack.append, 0
        dispatch, read = self.dispatch, self.read
        try:
            while True:
                dispatch[read(1)[0]](self)
        except _PythonsStop as stop:
            return stop.value

    def load_frame(self) -> None:
        """Pass the length of a frame: all is in memory, where frames save nothing."""
        if len(self.read(8)) < 8:
            raise EOFError("a frame without its length")

    def find_class(self, module: str, name: str) -> Named:
        if self.proto < 3:  # which has the names of Python 2
            module, name = NAME_MAPPING.get((module, name), (module, name))
            module = IMPORT_MAPPING.get(module, module)
        named = Named(module, name)
        self._admit(named)
        return named

    def persistent_load(self, words: Any) -> Stored:
        return Stored(words)

    def load_stop(self) -> None:
        if len(self.stack) != 1 or self.metastack:
            raise TypeError("an end with more or less than one value")
        super().load_stop()

    # Python's own take text that cannot be encoded again

    def load_short_binunicode(self) -> None:
        self.append(self.read(self.read(1)[0]).decode())

    def load_binunicode(self) -> None:
        self.append(self.read(*_UINT.unpack(self.read(4))).decode())

    def load_binunicode8(self) -> None:
        self.append(self.read(*_LONG.unpack(self.read(8))).decode())

    def load_long_binput(self) -> None:
        (place,) = _UINT.unpack(self.read(4))
        if place > self._length:  # other unpicklers reserve memory for all places before
            raise ValueError(f"memo place {place:,} in a pickle of {self._length:,} bytes")
        self.memo[place] = self.stack[-1]

    def load_reduce(self) -> None:
        args, by = self.stack.pop(), self.stack.pop()
        if not (isinstance(by, Named) and isinstance(args, tuple)):
            raise TypeError("a call of what was not named")
        if by == _ENCODE and args[1:] not in _OF_BYTES:  # others are looked for, and imported
            raise ValueError("text in another encoding than that of bytes")
        if by == _SIZE and isinstance(args[0], tuple):
            self.append(args[0])
        elif by == _ORDERED_DICT and not args:
            self.append({})
        else:
            self.append(Made(by, args))

    load_newobj = load_reduce

    def load_build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, Made):
            target.state = state
        elif not isinstance(target, dict):  # an OrderedDict may have attributes
            raise TypeError("a state of what has none")

    def load_append(self) -> None:
        self._extend([self.stack.pop()])

    def load_appends(self) -> None:
        self._extend(self.pop_mark())

    def _extend(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, list):
            target.extend(values)
        elif not isinstance(target, Made):
            raise TypeError("elements of what has none")

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set_items([key, value])

    def load_setitems(self) -> None:
        self._set_items(self.pop_mark())

    def _set_items(self, values: list[Any]) -> None:
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


_UINT, _LONG = struct.Struct("<I"), struct.Struct("<Q")

_ADMITTED = b"".join(
    (
        pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK,
        pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE,
        pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.BINFLOAT,
        pickle.SHORT_BINUNICODE, pickle.BINUNICODE, pickle.BINUNICODE8,
        pickle.SHORT_BINBYTES, pickle.BINBYTES, pickle.BINBYTES8,
        pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3,
        pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS,
        pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS,
        pickle.MEMOIZE, pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET,
        pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.REDUCE, pickle.NEWOBJ, pickle.BUILD,
        pickle.BINPERSID,
    )
)  # fmt: skip
"""Operations that pickles of checkpoints have."""

_Reader.dispatch = {
    code: getattr(_Reader, operation.__name__)
    for code, operation in _PythonsUnpickler.dispatch.items()
    if code in _ADMITTED
}
