"""Whether an archive that ``torch.save`` wrote still holds what was written.

It is a zip of stored, not compressed, records, each with a CRC-32 that ``torch.load`` does not
compare. A torch_dist checkpoint holds many of them in one file, one behind the other.
"""

import hashlib
import struct
import zipfile
from math import prod
from typing import IO, Any

BLOCK_BYTES = 4 * 2**20
"""How much is read at once: the memory that checking takes."""

_DIRECTORY = 0x10  # bit of MS-DOS; of such a record torch's reader fills in nothing, and succeeds


def table_defect(stream: IO[bytes]) -> str | None:
    """Say why the table of an archive, at its end, cannot be read; None when it can.

    Args:
        stream: the archive, seekable.
    """
    try:
        _table(stream)
    except Exception as error:  # a damaged zip makes zipfile raise nearly anything
        return _reason(error)
    return None


def contents_defect(stream: IO[bytes]) -> str | None:
    """Say which record of an archive does not have its CRC-32, or why there is none; else None.

    Reads the archive once, in blocks, where torch would read it.
    """
    try:
        with zipfile.ZipFile(stream) as archive:
            records = _table(stream)
            for record in records:
                with archive.open(record) as content:
                    while content.read(BLOCK_BYTES):  # compares the CRC at the end of the record
                        pass
        return _difference_to_torch(stream, records)
    except Exception as error:
        return _reason(error)


def _difference_to_torch(stream: IO[bytes], records: list[zipfile.ZipInfo]) -> str | None:
    """Say where torch's reader of zips, which is another one, would read other bytes."""
    import torch  # takes seconds, which the check of metadata can do without

    stream.seek(0)
    reader: Any = torch._C.PyTorchFileReader(stream)
    if len(reader.get_all_records()) != len(records):
        return "damaged archive: torch reads other records"
    for record in records:
        stream.seek(record.header_offset + 26)
        lengths = struct.unpack("<HH", stream.read(4))  # of the name and of the extra field
        name = record.filename.partition("/")[2]
        if reader.get_record_offset(name) != record.header_offset + 30 + sum(lengths):
            return f"damaged archive: torch reads {name!r} elsewhere"
    return None


def tensor_defect(stream: IO[bytes], dtype: str, shape: tuple[int, ...]) -> str | None:
    """Say how an archive differs from that of one tensor of ``shape``; None if it does not.

    Reads how the tensor is described, and not its values; runs no code that a pickle names.

    Args:
        stream: the archive.
        dtype: of the tensor, as torch prints it: ``torch.bfloat16``.
        shape: of the tensor.
    """
    import torch
    from torch._subclasses import FakeTensorMode

    try:
        sizes = [record.file_size for record in _table(stream) if _is_storage(record.filename)]
        stream.seek(0)
        with FakeTensorMode():
            tensor = torch.load(stream, map_location="cpu", weights_only=True)
        got = f"{tensor.dtype} {tuple(tensor.shape)}"
        is_whole = sizes == [prod(shape) * tensor.element_size()]
    except Exception as error:
        return _reason(error)
    if got != f"{dtype} {shape}":
        return f"expected a tensor of {dtype} {shape}, got {got}"
    return None if is_whole else f"expected the bytes of {dtype} {shape}, got {sum(sizes)} of them"


def table_digest(stream: IO[bytes]) -> bytes:
    """Return 32 bytes that stand for names, places, sizes and CRCs of all records of an archive.

    Reads the table alone; of a damaged one there is none, and the result is empty. Archives with
    the same digest and right CRCs hold the same.
    """
    try:
        rows = [(row.filename, row.header_offset, row.file_size, row.CRC) for row in _table(stream)]
    except Exception:
        return b""
    return hashlib.sha256(repr(rows).encode()).digest()


def _table(stream: IO[bytes]) -> list[zipfile.ZipInfo]:
    """Return the records of an archive, each once and stored as torch stores it."""
    stream.seek(0)
    records = zipfile.ZipFile(stream).infolist()
    names = [record.filename for record in records]
    if len(set(names)) < len(names) or not any(name.endswith("/data.pkl") for name in names):
        raise zipfile.BadZipFile("not the records that torch.save writes")
    for record in records:
        if record.compress_type != zipfile.ZIP_STORED or record.file_size != record.compress_size:
            raise zipfile.BadZipFile(f"record {record.filename!r} is not stored as it is")
        if record.external_attr & _DIRECTORY:
            raise zipfile.BadZipFile(f"record {record.filename!r} is marked as a directory")
    return records


def _is_storage(name: str) -> bool:
    return name.split("/")[1:-1] == ["data"]


def _reason(error: Exception) -> str:
    first_line = (str(error).splitlines() or [""])[0]
    return f"damaged archive: {first_line or type(error).__name__}"
