"""Edits a number or a few entries of a saved object without unpickling it."""

import io
import pickle
import pickletools
import zipfile

from moe_optim.checkpoint.files.archives import Archive


def replace_int(blob: bytes, key: str, value: int | None) -> bytes | None:
    """Return a ``torch.save`` archive with another int after a string key, or None without the key.

    Replaces the int or None after every occurrence of the key. All other bytes of the pickle stay
    the same, including objects of unknown classes.

    Raises:
        ValueError: the pickle in ``blob`` cannot be read.
    """
    archive = Archive(io.BytesIO(blob))
    archive.load()
    changed = _splice(archive.pickled(), key, value)
    return None if changed is None else _with_pickle(blob, changed)


def _with_pickle(blob: bytes, pickled: bytes) -> bytes:
    source, target = zipfile.ZipFile(io.BytesIO(blob)), io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        for name in source.namelist():
            content = pickled if name.endswith("/data.pkl") else source.read(name)
            archive.writestr(zipfile.ZipInfo(name), content)  # without the time of day
    return target.getvalue()


def _splice(pickled: bytes, key: str, value: int | None) -> bytes | None:
    """Return a pickle with ``value`` after each ``key``; None without one, or for no number."""
    code = pickle.dumps(value, protocol=2)[2:-1]  # between PROTO and STOP
    parts, copied, awaits = [], 0, False
    operations = list(pickletools.genops(pickled))
    ends = [position for _, _, position in operations[1:]] + [len(pickled)]
    for (operation, argument, start), end in zip(operations, ends, strict=True):
        if awaits and operation.name not in ("BINPUT", "LONG_BINPUT", "PUT", "MEMOIZE"):
            if operation.name not in ("NONE", "BININT", "BININT1", "BININT2"):
                return None
            parts += [pickled[copied:start], code]
            copied, awaits = end or 0, False
        awaits = awaits or ("UNICODE" in operation.name and argument == key)
    return b"".join([*parts, pickled[copied:]]) if parts else None
