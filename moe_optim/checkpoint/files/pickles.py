"""Reads pickles without running any code that they name.

Python's C unpickler reads them with a stand-in for every class and function: calling one makes a
:class:`Made`, which keeps the arguments. No code of a checkpoint runs, nothing is imported, and
names that are not allowed are refused before any object is made.

A first scan of the opcodes refuses those that checkpoints do not use, and those that make the
unpickler reserve more memory than the pickle has bytes. Time is not bounded: hashing a key of
nested tuples can take forever, here as in Megatron.
"""

import gc
import io
import pickle
import re
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

ITEM_BYTES = {
    f"torch.{name}": size
    for size, names in (
        (1, "bool uint8 int8 float8_e4m3fn float8_e5m2"),
        (1, "float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"),
        (2, "uint16 int16 float16 bfloat16"),
        (4, "uint32 int32 float32 complex32"),
        (8, "uint64 int64 float64 complex64"),
        (16, "complex128"),
    )
    for name in names.split()
}
"""Element size in bytes, by dtype as torch prints it."""
STORAGES = {
    "BoolStorage": "bool",
    "ByteStorage": "uint8",
    "CharStorage": "int8",
    "ShortStorage": "int16",
    "IntStorage": "int32",
    "LongStorage": "int64",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}
"""Dtypes by name of torch's typed storages."""

_PLAIN = {  # constructors of values without side effects, by module
    "builtins": "bool bytearray bytes complex dict float frozenset int list range set slice str "
    "tuple",
    "collections": "Counter OrderedDict defaultdict deque",
    "argparse": "Namespace",
    "types": "SimpleNamespace",
    "pathlib": "PosixPath PurePosixPath",
    "pathlib._local": "PosixPath PurePosixPath",
    "io": "BytesIO",
    "_io": "BytesIO",
    "signal": "Signals",
    "_codecs": "encode",  # makes bytes in protocol 2
    "numpy": "dtype ndarray",
    "numpy.core.multiarray": "_reconstruct scalar",
    "numpy._core.multiarray": "_reconstruct scalar",
    "numpy.dtypes": "UInt32DType",
    "torch": " ".join(
        ["Generator", "Size", "device", *STORAGES, *(name.split(".")[1] for name in ITEM_BYTES)]
    ),
    "torch._C": "Generator",
    "torch._utils": "_rebuild_parameter _rebuild_tensor_v2 _rebuild_tensor_v3",
    "torch.nn.parameter": "Parameter",
    "torch.serialization": "_get_layout",
    "torch.storage": "UntypedStorage",
}
MEGATRONS_PACKAGES = {"megatron", "moe_optim", "transformer_engine"}
"""Packages whose enumerations and dataclasses count as plain data."""
_ENCODINGS_OF_BYTES = (("latin1",), ("latin-1",))
_MOST_NAMES = 4096  # each stand-in takes 1 KiB


class Named(type):
    """A class, function or dtype named by a pickle; ``str`` gives ``module.name``."""

    module: str
    name: str

    def __str__(cls) -> str:
        text = f"{cls.module}.{cls.name}"[:200]
        return text if text.isprintable() else repr(text)


class Made:
    """An object as a pickle describes it; no code of its class has run.

    Items and elements that a pickle adds to it are dropped.
    """

    __slots__ = ("args", "state")
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> "Made":  # noqa: D102
        made = super().__new__(cls)
        made.args, made.state = args, None
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        """Drop an element."""

    @property
    def by(self) -> Named:
        """Class or function that the pickle calls."""
        named: Any = type(self)
        return named

    def __repr__(self) -> str:
        return f"<{self.by}>"  # arguments may be nested arbitrarily


class Record(list[Any]):
    """An object of a class without arguments, as a list of the states that a pickle gives it.

    Unlike for :class:`Made`, no Python function runs for each of them. Arguments are dropped.
    """

    __slots__ = ()
    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__
    __init__ = object.__init__
    __setstate__ = list.append

    def __repr__(self) -> str:
        return f"<{type(self)}>"


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A persistent reference, such as to the bytes of a tensor."""

    words: Any


class _Items(dict[Any, Any]):
    """An OrderedDict that accepts attributes, which PyTorch sets."""


def names_of(by_module: Mapping[str, str]) -> set[tuple[str, str]]:
    """Return (module, name) pairs; ``by_module`` maps modules to space-separated names."""
    return {(module, name) for module, names in by_module.items() for name in names.split()}


_PLAIN_NAMES = names_of(_PLAIN)


class ForeignNameError(ValueError):
    """A pickle names a class or function that is not allowed."""

    def __init__(self, named: Named) -> None:
        self.named = named
        super().__init__(f"it names {named}")


def read_pickle(
    content: bytes,
    allows: Callable[[Named], bool] | None = None,
    records: Container[tuple[str, str]] = (),
) -> Any:
    """Return the content of a pickle: plain values, ``Named``, ``Made``, ``Record``, ``Stored``.

    ``torch.Size`` becomes a tuple and ``OrderedDict`` a dict.

    Args:
        content: pickle of protocol 2 or later.
        allows: predicate of allowed names; None allows all.
        records: module and name of classes whose objects become ``Record``.

    Raises:
        ForeignNameError: a name is not allowed.
        ValueError: pickle is cut off, or uses opcodes that checkpoints do not.
    """
    try:
        protocol = _scan(content)
        return _Unpickler(content, protocol, allows, records).load()
    except ForeignNameError:
        raise
    except Exception as error:  # the unpickler raises arbitrary errors for damaged pickles
        said = str(error) or type(error).__name__
        raise ValueError(f"no pickle of a checkpoint: {said}") from error


def is_plain(named: Named) -> bool:
    """Return whether a name denotes a value, container, tensor or array type."""
    return (named.module, named.name) in _PLAIN_NAMES


def foreign_name(pickled: bytes, knows: Callable[[Named], bool] | None = None) -> str | None:
    """Return why unpickling by Python's own rules may run code, None for plain data.

    Args:
        pickled: pickle of an object.
        knows: predicate of further names that denote plain data. None: class names in Megatron's
            packages, which are enumerations and dataclasses; none is imported.
    """
    also = knows or _is_named_as_megatrons
    try:
        read_pickle(pickled, lambda named: is_plain(named) or also(named))
    except ValueError as error:
        return str(error)
    return None


def _is_named_as_megatrons(named: Named) -> bool:
    is_class = named.name.isidentifier() and named.name[0].isupper()
    return is_class and named.module.partition(".")[0] in MEGATRONS_PACKAGES


@contextmanager
def no_collections() -> Iterator[None]:
    """Pause the garbage collector, which would traverse millions of acyclic values.

    For one thread at a time.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class _Unpickler(pickle.Unpickler):
    def __init__(
        self,
        content: bytes,
        protocol: int,
        allows: Callable[[Named], bool] | None,
        records: Container[tuple[str, str]],
    ) -> None:
        super().__init__(io.BytesIO(content))
        self._has_old_names, self._allows, self._records = protocol < 3, allows, records
        self._names: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:  # noqa: D102
        if self._has_old_names:  # Python 2 names
            module, name = NAME_MAPPING.get((module, name), (module, name))
            module = IMPORT_MAPPING.get(module, module)
        if (module, name) not in self._names:
            if len(self._names) == _MOST_NAMES:
                raise ValueError(f"it names more than {_MOST_NAMES:,} classes")
            base = Record if (module, name) in self._records else Made
            named = Named("Made", (base,), {"__slots__": (), "module": module, "name": name})
            if self._allows is not None and not self._allows(named):
                raise ForeignNameError(named)
            make = _FUNCTIONS.get((module, name))
            made = _Function(make, named) if make else named
            self._names[module, name] = _SIZE if (module, name) == ("torch", "Size") else made
        return self._names[module, name]

    def persistent_load(self, words: Any) -> Stored:  # noqa: D102
        return Stored(words)


class _Function:
    """A function that is executed; its slots leave no attribute for a pickle to set."""

    __slots__ = ("_make", "_named")

    def __init__(self, make: Callable[..., Any], named: Named) -> None:
        self._make, self._named = make, named

    def __call__(self, *args: Any) -> Any:
        return self._make(self._named, *args)


_SIZE = ().__add__
"""Returns a tuple as it is, and refuses lists, which would be copied on every call."""


def _ordered_dict(named: Named, *args: Any) -> Any:
    return named(*args) if args else _Items()


def _encode(named: Named, text: Any, *encoding: str) -> Any:
    if encoding not in _ENCODINGS_OF_BYTES:  # Python would import other codecs
        raise ValueError("text in another encoding than that of bytes")
    return named(text, *encoding)


_FUNCTIONS: dict[tuple[str, str], Callable[..., Any]] = {
    ("collections", "OrderedDict"): _ordered_dict,
    ("_codecs", "encode"): _encode,
}

_NO_ARGUMENT = (
    pickle.MARK, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE,
    pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3,
    pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS,
    pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS,
    pickle.MEMOIZE, pickle.STACK_GLOBAL, pickle.REDUCE, pickle.NEWOBJ, pickle.BUILD,
    pickle.BINPERSID,
)  # fmt: skip
_ALONE = re.escape(b"".join(_NO_ARGUMENT))
_OF_FIXED_LENGTH = re.compile(
    rb"(?:[%b]*+(?:[%b].|[%b].{4}|%b..|[%b].{8}|%b[^\n]{1,999}\n[^\n]{1,999}\n))*+[%b]*+"
    % (
        _ALONE,
        pickle.BININT1 + pickle.BINPUT + pickle.BINGET,
        pickle.BININT + pickle.LONG_BINGET,
        pickle.BININT2,
        pickle.BINFLOAT + pickle.FRAME,
        pickle.GLOBAL,
        _ALONE,
    ),
    re.DOTALL,
)
"""Runs of allowed fixed-length opcodes; ``_scan`` handles the others."""
_TEXTS = {pickle.SHORT_BINUNICODE: 1, pickle.BINUNICODE: 4, pickle.BINUNICODE8: 8}
_BYTES = {pickle.SHORT_BINBYTES: 1, pickle.BINBYTES: 4, pickle.BINBYTES8: 8, pickle.LONG1: 1}
"""Size of the length field in bytes, by opcode."""


def _scan(content: bytes) -> int:
    """Return the protocol; ValueError if unpickling may take more memory than the pickle's size."""
    if content[:1] != pickle.PROTO or len(content) < 2:
        raise ValueError("it does not begin with a protocol")
    at = 2
    while True:
        at = _OF_FIXED_LENGTH.match(content, at).end()  # type: ignore[union-attr]
        operation = content[at : at + 1]
        if operation == pickle.STOP:
            return content[1]
        if operation == pickle.LONG_BINPUT:
            place = int.from_bytes(content[at + 1 : at + 5], "little")
            if place > len(content):  # unpicklers allocate all preceding places
                raise ValueError(f"memo place {place:,} in a pickle of {len(content):,} bytes")
            at += 5
            continue
        width = _TEXTS.get(operation) or _BYTES.get(operation)
        if width is None:
            raise ValueError(f"truncated, or with an unknown operation at byte {at:,}")
        start = at + 1 + width
        at = start + int.from_bytes(content[at + 1 : start], "little")
        if at > len(content):
            raise ValueError(f"text or bytes beyond its end at byte {start:,}")
        if operation in _TEXTS:
            content[start:at].decode()  # reject invalid UTF-8, which Megatron's unpickler accepts
