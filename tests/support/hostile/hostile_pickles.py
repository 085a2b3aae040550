"""Pickles and archives of ``torch.save`` that are not what they should be."""

import io
import os
import pickle
import pickletools
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

CODE: dict[str, tuple[str, str]] = {  # what Python's unpickler would call with one argument
    "eval": ("builtins", "eval"),
    "exec": ("builtins", "exec"),
    "by its name in Python 2": ("__builtin__", "eval"),
    "of torch": ("torch._dynamo.guards", "eval"),
    "a dotted name": ("torch.serialization", "os.mkdir"),
    "mkdir": ("os", "mkdir"),
    "mkdir of posix": ("posix", "mkdir"),
    "partial": ("functools", "partial"),
    "import": ("importlib", "import_module"),
}


class Command:
    """Unpickled, it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str]]:
        return os.mkdir, (str(self.path),)


def program(canary: Path, rng: random.Random) -> bytes:
    """Return operations that leave a value, for which unpickling makes a folder ``canary``."""
    module, name = rng.choice(list(CODE.values()))
    is_expression = name in ("eval", "exec")
    text = f"__import__('os').mkdir({str(canary)!r})" if is_expression else str(canary)
    named = f"c{module}\n{name}\n".encode()
    if rng.random() < 0.3:
        named = b"".join(b"\x8c" + bytes([len(word)]) + word.encode() for word in (module, name))
        named += b"\x93"
    argument = b"X" + struct.pack("<I", len(text)) + text.encode()
    how = rng.choice((b"\x85R", b"\x85\x81", b"\x85R", b"\x85R0N"))
    return named + argument + how


BOMBS: dict[str, bytes] = {
    "a far place in the memo": b"Nr" + struct.pack("<I", 2**31),
    "a bytearray of 64 GiB": b"\x96" + struct.pack("<Q", 2**36),
    "bytes of 64 GiB": b"\x8e" + struct.pack("<Q", 2**36),
    "text of 4 GiB": b"X" + struct.pack("<I", 2**32 - 1),
    "text of no size": b"\x8d" + struct.pack("<Q", 2**64 - 1),
    "bytes of no size": b"\x8e" + struct.pack("<Q", 2**64 - 1),
    "a frame of no size": b"\x95" + struct.pack("<Q", 2**64 - 1),
    "a number of 2 GiB": b"\x8b" + struct.pack("<i", 2**31 - 1),
    "a number of 5,000 digits": b"L" + b"9" * 5000 + b"L\n",
    "a number of 2,000 bits": b"\x8a\xfa" + b"\x7f" * 250,
    "lists in lists": b"]" * 50_000 + b"a" * 49_999,
    "tuples in tuples": b")" + b"\x85" * 1_000,
    "marks": b"(" * 50_000,
    "a list in itself": b"]q\xc8h\xc8a",
    "no number": b"G\x7f\xf8\x00\x00\x00\x00\x00\x00",
    "infinity": b"G\x7f\xf0\x00\x00\x00\x00\x00\x00",
    "none": b"N",
    "a negative number": b"J\xff\xff\xff\xff",
    "a large number": b"\x8a\x08" + struct.pack("<q", 2**62 + 1),
    "half of a character": b"X\x03\x00\x00\x00\xed\xa0\x80",
    "an escape sequence": b"X\x05\x00\x00\x00\x1b[31m",
    "an empty text": b"X\x00\x00\x00\x00",
    "a path out": b"X\x14\x00\x00\x00../outside/secret.pt",
    "an extension": b"\x82\x01",
}
"""Operations that leave one value, or should not be carried out."""


_VALUES = {"NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"}
_VALUES |= {"BINUNICODE", "SHORT_BINUNICODE", "EMPTY_TUPLE", "EMPTY_DICT", "EMPTY_LIST", "BINGET"}


def mutate_pickle(content: bytes, canary: Path, rng: random.Random) -> bytes:
    """Return a pickle with one to three of its operations changed."""
    operations = list(pickletools.genops(content))
    starts = [position for _, _, position in operations]
    ends = [*starts[1:], len(content)]
    pieces = [content[start:end] for start, end in zip(starts, ends, strict=True)]
    values = [i for i, (operation, _, _) in enumerate(operations) if operation.name in _VALUES]
    for _ in range(rng.choice((1, 1, 2, 3))):
        place = rng.choice(values) if rng.random() < 0.7 else rng.randrange(1, len(pieces) - 1)
        hostile = rng.choice((program(canary, rng), rng.choice(list(BOMBS.values()))))
        kind = rng.randrange(6)
        if kind < 2:
            pieces[place] = hostile
        elif kind == 2:  # leaves what stands there, and does more before
            pieces[place] = hostile + rng.choice((b"0", b"")) + pieces[place]
        elif kind == 3:
            pieces[place] = rng.choice((b"", pieces[place] * 2))
        elif kind == 4:
            pieces[place] = pieces[rng.choice(values)]
        else:
            pieces[place] = _other_value(pieces[place], rng)
    changed = b"".join(pieces)
    return changed[: rng.randrange(len(changed))] if rng.random() < 0.05 else changed


def _other_value(piece: bytes, rng: random.Random) -> bytes:
    """Return an operation of the same kind with other content, of the same length."""
    if len(piece) < 2:
        return piece
    changed = bytearray(piece)
    changed[rng.randrange(1, len(piece))] = rng.choice((0, 1, 0x2E, 0x7F, 0x80, 0xFF))
    return bytes(changed)


def _add(name: str) -> Callable[[dict[str, bytes], random.Random], None]:
    def add(records: dict[str, bytes], rng: random.Random) -> None:
        records[f"archive/{name}"] = rng.randbytes(20)

    return add


def _drop(records: dict[str, bytes], rng: random.Random) -> None:
    del records[rng.choice(list(records))]


def _resize(records: dict[str, bytes], rng: random.Random) -> None:
    name = rng.choice(list(records))
    records[name] = rng.choice((b"", records[name][:-1], records[name] * 2, b"\0" * 10_000))


def _rename(records: dict[str, bytes], rng: random.Random) -> None:
    name = rng.choice(list(records))
    other = rng.choice(("archive/../../x", "/etc/x", "archive/data/00", "x", "a\0b", "archive/Ü"))
    records[other] = records.pop(name)


RECORDS: dict[str, Callable[[dict[str, bytes], random.Random], None]] = {
    "TorchScript": _add("constants.pkl"),
    "code of TorchScript": _add("code/__torch__.py"),
    "one more record": _add("data/7"),
    "a record less": _drop,
    "a record of another size": _resize,
    "a record of another name": _rename,
}


def mutate_archive(content: bytes, canary: Path, rng: random.Random) -> bytes:
    """Return an archive of ``torch.save`` with another pickle, other records, or another shape."""
    source = zipfile.ZipFile(io.BytesIO(content))
    records = {name: source.read(name) for name in source.namelist()}
    kind = rng.random()
    if kind < 0.6:
        pickled = next(name for name in records if name.endswith("data.pkl"))
        records[pickled] = mutate_pickle(records[pickled], canary, rng)
    elif kind < 0.8:
        rng.choice(list(RECORDS.values()))(records, rng)
    target = io.BytesIO()
    compression = zipfile.ZIP_DEFLATED if rng.random() < 0.05 else zipfile.ZIP_STORED
    with zipfile.ZipFile(target, "w", compression) as archive:
        for name, record in records.items():
            archive.writestr(name, record)
    changed = target.getvalue()
    return _reshape(changed, canary, rng) if kind > 0.8 else changed


def _reshape(content: bytes, canary: Path, rng: random.Random) -> bytes:
    """Return an archive with something before, behind or inside of what zips consist of."""
    foreign = b"\x80\x02" + program(canary, rng) + b"."
    table = content.rindex(b"PK\5\6")
    kind = rng.randrange(7)
    if kind == 0:
        return foreign + content
    if kind == 1:
        return content + foreign
    if kind == 2:
        return foreign
    if kind == 3:  # a comment that is another table
        return content[:-2] + struct.pack("<H", len(content)) + content
    if kind == 4:
        return pickle.dumps(b"x") + content[table:]
    changed = bytearray(content)
    first = content.index(b"PK\1\2") if kind == 5 else table
    for _ in range(rng.choice((1, 2, 4))):
        changed[rng.randrange(first, len(content))] = rng.randrange(256)
    return bytes(changed)
