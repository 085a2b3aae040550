"""Objects of checkpoints: reading them, and changing a number or a few entries in one.

Megatron's common state holds enumerations and metadata of its own. They are read as they were
written, without their classes: looking at a checkpoint imports no Megatron, and runs nothing.
"""

import io
import pickle
import pickletools
import zipfile
from collections.abc import Callable, Mapping
from typing import IO, Any

from moe_optim.checkpoint.files.archives import Archive
from moe_optim.checkpoint.files.plain_pickles import Named, names_of, read_pickle
from moe_optim.checkpoint.files.stored_metadata import ITEM_BYTES
from moe_optim.checkpoint.files.stored_tensors import STORAGES

_PLAIN = {  # by module: what makes values of its arguments, and does nothing else
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
    "_codecs": "encode",  # makes bytes, of which protocol 2 has none
    "numpy": "dtype ndarray",
    "numpy.core.multiarray": "_reconstruct scalar",
    "numpy._core.multiarray": "_reconstruct scalar",
    "numpy.dtypes": "UInt32DType",
    "torch": f"Generator Size device {' '.join(STORAGES)}",
    "torch._C": "Generator",
    "torch._utils": "_rebuild_parameter _rebuild_tensor_v2 _rebuild_tensor_v3",
    "torch.nn.parameter": "Parameter",
    "torch.serialization": "_get_layout",
    "torch.storage": "UntypedStorage",
}
_PLAIN_NAMES = names_of(_PLAIN) | {Named(*dtype.split(".")) for dtype in ITEM_BYTES}


MEGATRONS_PACKAGES = {"megatron", "moe_optim", "transformer_engine"}
"""Whose enumerations and dataclasses are plain data."""


class ForeignNameError(ValueError):
    """A pickle names what is not known to make plain data."""

    def __init__(self, named: Named) -> None:
        self.named = named
        super().__init__(f"it names {named}")


def load_object(file: IO[bytes]) -> Any:
    """Return what ``torch.save`` wrote, what it names as ``plain_pickles`` has it.

    Raises:
        Exception: whatever a damaged zip leads to; ValueError from a damaged pickle.
    """
    return read_pickle(Archive(file).pickled())


def require_plain(file: IO[bytes], knows: Callable[[Named], bool]) -> None:
    """Refuse an object of ``torch.save`` that would run code where it is unpickled.

    Plain data are values, containers, tensors and arrays, and what ``knows`` says to be as
    harmless. Whoever unpickles it may still run out of memory.

    Args:
        file: the archive, in which torch reads what is read here (``archives.contents_defect``).
        knows: says of a name that is none of these whether it makes plain data.

    Raises:
        ForeignNameError: it names something else.
        ValueError: its pickle cannot be read.
    """

    def admit(named: Named) -> None:
        if named not in _PLAIN_NAMES and not knows(named):
            raise ForeignNameError(named)

    read_pickle(Archive(file).pickled(), admit)


def foreign_to_plain_data(file: IO[bytes]) -> str | None:
    """Say what keeps an object from being plain data, or nothing: it may run code where it is read.

    Classes of Megatron's own packages are taken for the enumerations and dataclasses of its
    arguments, by their names: none of them is imported.
    """
    try:
        require_plain(file, _is_named_as_megatrons)
    except (ValueError, zipfile.BadZipFile) as error:
        return str(error)
    return None


def _is_named_as_megatrons(named: Named) -> bool:
    is_class = named.name.isidentifier() and named.name[0].isupper()
    return is_class and named.module.partition(".")[0] in MEGATRONS_PACKAGES


def replace_int(blob: bytes, key: str, value: int | None) -> bytes | None:
    """Return a ``torch.save`` archive with another number behind a string key, or None without it.

    The key stands before an int or None wherever it occurs. Nothing else changes, objects of
    unknown classes included, since nothing is unpickled.

    Raises:
        ValueError: the pickle in ``blob`` cannot be read.
    """
    load_object(io.BytesIO(blob))
    found = False

    def splice(pickled: bytes) -> bytes:
        nonlocal found
        spliced, found = _splice(pickled, key, value)
        return spliced

    changed = _with_pickle(blob, splice)
    return changed if found else None


def replace_entries(blob: bytes, entries: Mapping[str, Any]) -> bytes:
    """Return a ``torch.save`` archive of a dict, or of a list with one, with other ``entries``.

    Nothing else changes, objects of unknown classes included, since nothing is unpickled.

    Args:
        blob: the archive.
        entries: key -> plain value (numbers, text, None, and lists, tuples and dicts of these).

    Raises:
        ValueError: the archive cannot be read, or holds something else.
    """
    code = b"".join(  # puts each into the dict on top of the stack: between PROTO and STOP
        pickle.dumps(key, protocol=2)[2:-1] + pickle.dumps(value, protocol=2)[2:-1] + b"s"
        for key, value in entries.items()
    )

    def splice(pickled: bytes) -> bytes:
        operations = [operation.name for operation, _, _ in pickletools.genops(pickled)]
        end = -2 if operations[-2] == "APPEND" else -1  # of the dict; STOP is the last byte
        return pickled[:end] + code + pickled[end:]

    before = load_object(io.BytesIO(blob))
    changed = _with_pickle(blob, splice)
    after = load_object(io.BytesIO(changed))
    if type(before) is list and len(before) == len(after) == 1:
        before, after = before[0], after[0]
    if type(before) is not dict or list(after) != list({**before, **entries}):
        raise ValueError("expected a dict, got something else")
    return changed


def _with_pickle(blob: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """Return an archive of ``torch.save`` with what ``change`` makes of its pickle."""
    source, target = zipfile.ZipFile(io.BytesIO(blob)), io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        for name in source.namelist():
            content = source.read(name)
            archive.writestr(name, change(content) if name.endswith("/data.pkl") else content)
    return target.getvalue()


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
