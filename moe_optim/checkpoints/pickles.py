"""Reading pickles of checkpoints without running what they name.

Megatron's common state holds enumerations and metadata of its own. They are read as inert objects,
so that looking at a checkpoint imports no Megatron, and a foreign pickle calls nothing.
"""

import argparse
import collections
import io
import pickle
import pickletools
import zipfile
from types import SimpleNamespace
from typing import IO, Any

import torch
from torch._utils import _rebuild_tensor_v2

_TRUSTED: dict[tuple[str, str], Any] = {
    ("argparse", "Namespace"): argparse.Namespace,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch", "Size"): torch.Size,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor_v2,
    **{("builtins", kind.__name__): kind for kind in (set, frozenset, complex, slice, range)},
}


class Inert:
    """Stands for an object of a class that is not trusted; keeps the words it was made from."""

    def __new__(cls, *args: Any, **_kwargs: Any) -> "Inert":
        """Take any arguments: a pickle may call a class as it likes."""
        self = super().__new__(cls)
        self.args = args
        return self

    args: tuple[Any, ...]

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        """Forget an item: what a class that is not known means by it is not known either."""

    def append(self, value: Any) -> None:
        """Forget an item, as above."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.args))})"


class InertUnpickler(pickle.Unpickler):
    """An unpickler that makes plain values and tensors, and of all else ``Inert``."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a trusted class or function, or a class of inert objects."""
        if (module, name) in _TRUSTED:
            return _TRUSTED[module, name]
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        return type(name, (Inert,), {"__module__": module})


def load_object(file: IO[bytes]) -> Any:
    """Return what ``torch.save`` wrote; raises whatever a damaged file leads to."""
    module = SimpleNamespace(Unpickler=InertUnpickler, __name__="pickle")
    return torch.load(file, map_location="cpu", weights_only=False, pickle_module=module)


def replace_int(blob: bytes, key: str, value: int | None) -> bytes | None:
    """Return a ``torch.save`` archive with another number behind a string key, or None without it.

    Nothing else changes, objects of unknown classes included, since nothing is unpickled.

    Args:
        blob: the archive.
        key: stands before an int or None wherever it occurs.
        value: goes there.
    """
    source = zipfile.ZipFile(io.BytesIO(blob))
    target, found = io.BytesIO(), False
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        for name in source.namelist():
            content = source.read(name)
            if name.endswith("data.pkl"):
                content, found = _splice(content, key, value)
            archive.writestr(name, content)
    return target.getvalue() if found else None


def _splice(pickled: bytes, key: str, value: int | None) -> tuple[bytes, bool]:
    """Return a pickle with ``value`` behind each ``key``, and whether there was one."""
    code = pickle.dumps(value, protocol=2)[2:-1]  # between PROTO and STOP
    parts, copied, awaits = [], 0, False
    operations = list(pickletools.genops(pickled))
    ends = [position for _, _, position in operations[1:]] + [len(pickled)]
    for (operation, argument, start), end in zip(operations, ends, strict=True):
        if awaits and operation.name not in ("BINPUT", "LONG_BINPUT", "PUT", "MEMOIZE"):
            if operation.name not in ("NONE", "BININT", "BININT1", "BININT2"):
                return pickled, False
            parts += [pickled[copied:start], code]
            copied, awaits = end or 0, False
        awaits = awaits or ("UNICODE" in operation.name and argument == key)
    return b"".join([*parts, pickled[copied:]]), bool(parts)
