"""Whether an archive that ``torch.save`` wrote still holds what was written.

It is a zip of stored, not compressed, records, each with a CRC-32 that ``torch.load`` does not
compare. A torch_dist checkpoint holds many of them in one file, one behind the other.

No archive is given to ``torch.load`` here: by its records that takes one for TorchScript, which is
a program and runs.
"""

import hashlib
import os
import struct
import zipfile
from typing import IO, Any

BLOCK_BYTES = 4 * 2**20
"""How much is read at once: the memory that checking takes."""
PICKLE_BYTES = 16 * 2**20
"""More than any record has, but for the bytes of a tensor: names and shapes of a whole model."""

_DIRECTORY = 0x10  # bit of MS-DOS; of such a record torch's reader fills in nothing, and succeeds
_TABLE_BYTES = 16 * 2**20
_FIRST, _END, _END64, _LOCATOR64 = (b"PK" + code for code in (b"\3\4", b"\5\6", b"\6\6", b"\6\7"))
_END_FORM = struct.Struct("<4s4H2IH")
_END64_FORM = struct.Struct("<4sQ2H2I4Q")
_LOCATOR64_FORM = struct.Struct("<4sIQI")


class Archive:
    """The records of an archive, by their names without the folder that all are in."""

    def __init__(self, stream: IO[bytes]) -> None:
        """Read the table at the end of a seekable stream, which stays open.

        Raises:
            zipfile.BadZipFile: it is cut off, damaged, or not as torch writes it.
        """
        self._stream = stream
        count = _count_records(stream)
        stream.seek(0)
        self._zip = zipfile.ZipFile(stream)
        self.table = self._zip.infolist()
        self.records = {record.filename.partition("/")[2]: record for record in self.table}
        are_names = len({record.filename.partition("/")[0] for record in self.table}) == 1
        is_whole = len(self.records) == len(self.table) == count
        if not (are_names and is_whole and "data.pkl" in self.records):
            raise zipfile.BadZipFile("not the records that torch.save writes")
        if "constants.pkl" in self.records:
            raise zipfile.BadZipFile("a program in TorchScript, which no checkpoint is")
        for record in self.table:
            _require_stored(record)
        if sum(record.file_size for record in self.table) > stream.seek(0, os.SEEK_END):
            raise zipfile.BadZipFile("records that lie over each other")

    def pickled(self) -> bytes:
        """Return the pickle of the archive, in which bytes of tensors are records that it names.

        Raises:
            zipfile.BadZipFile: its CRC is another.
        """
        content: bytes = self._zip.read(self.records["data.pkl"])
        return content

    def size_of(self, name: str) -> int | None:
        """Return the bytes of a record; None without it."""
        record = self.records.get(name)
        return record.file_size if record else None

    def place_of(self, record: zipfile.ZipInfo) -> int:
        """Return where in the archive the bytes of a record start."""
        self._stream.seek(record.header_offset + 26)
        lengths = struct.unpack("<HH", self._stream.read(4))  # of the name and of the extra field
        return record.header_offset + 30 + int(sum(lengths))

    def read_into(self, name: str, buffer: memoryview) -> None:
        """Fill a buffer of a record's size with its bytes; EOFError if the archive ends before."""
        self._stream.seek(self.place_of(self.records[name]))
        if self._stream.readinto(buffer) < len(buffer):  # type: ignore[attr-defined]
            raise EOFError("an archive that ends too early")

    @property
    def is_little_endian(self) -> bool:
        """Whether numbers are stored as this machine has them."""
        order = self.records.get("byteorder")
        return order is None or (order.file_size == 6 and self._zip.read(order) == b"little")

    def compare_checksums(self) -> None:
        """Read every record once, in blocks; BadZipFile for one that does not have its CRC-32."""
        for record in self.table:
            with self._zip.open(record) as content:
                while content.read(BLOCK_BYTES):  # compares the CRC at the end of the record
                    pass


def table_defect(stream: IO[bytes]) -> str | None:
    """Say why the table of an archive, at its end, cannot be read; None when it can."""
    try:
        Archive(stream)
    except Exception as error:  # a damaged zip makes zipfile raise nearly anything
        return reason_of(error)
    return None


def contents_defect(stream: IO[bytes]) -> str | None:
    """Say which record of an archive does not have its CRC-32, or why there is none; else None.

    Reads the archive once, in blocks, where torch would read it.
    """
    try:
        archive = Archive(stream)
        archive.compare_checksums()
        return _difference_to_torch(stream, archive)
    except Exception as error:
        return reason_of(error)


def _difference_to_torch(stream: IO[bytes], archive: Archive) -> str | None:
    """Say where torch's reader of zips, which is another one, would read other bytes."""
    import torch  # takes seconds, which the check of metadata can do without

    stream.seek(0)
    reader: Any = torch._C.PyTorchFileReader(stream)
    if set(reader.get_all_records()) != archive.records.keys():
        return "damaged archive: torch reads other records"
    for name, record in archive.records.items():
        if reader.get_record_offset(name) != archive.place_of(record):
            return f"damaged archive: torch reads {name!r} elsewhere"
    return None


def table_digest(stream: IO[bytes]) -> bytes:
    """Return 32 bytes that stand for names, places, sizes and CRCs of all records of an archive.

    Reads the table alone; of a damaged one there is none, and the result is empty. Archives with
    the same digest and right CRCs hold the same.
    """
    try:
        table = Archive(stream).table
    except Exception:
        return b""
    rows = [(row.filename, row.header_offset, row.file_size, row.CRC) for row in table]
    return hashlib.sha256(repr(rows).encode()).digest()


def _count_records(stream: IO[bytes]) -> int:
    """Return how many records an archive says to have.

    Refused is what readers of zips could find another table in, or torch something else than a zip:
    they look for the end of the table from the end of the file on, and for its start by what that
    says, or right before it; torch takes what does not begin as a zip for a bare pickle.
    """
    size = stream.seek(0, os.SEEK_END)
    stream.seek(max(0, size - _END64_FORM.size - _LOCATOR64_FORM.size - _END_FORM.size))
    tail = stream.read()
    end = tail[-_END_FORM.size :]
    if len(end) < _END_FORM.size or not end.startswith(_END):
        raise zipfile.BadZipFile("no table of records at its end")
    *_, count, length, start, comment = _END_FORM.unpack(end)
    end_of_table = size - _END_FORM.size
    locator = tail[-_END_FORM.size - _LOCATOR64_FORM.size : -_END_FORM.size]
    if locator.startswith(_LOCATOR64):
        end_of_table = size - len(tail)
        end64 = tail[: _END64_FORM.size]
        place = _LOCATOR64_FORM.unpack(locator)[2]
        if place != end_of_table or not end64.startswith(_END64):
            raise zipfile.BadZipFile("the end of its table is said to lie elsewhere")
        *_, count, length, start = _END64_FORM.unpack(end64)
    stream.seek(0)
    is_zip = stream.read(len(_FIRST)) == _FIRST
    if comment or start + length != end_of_table or length > _TABLE_BYTES or not is_zip:
        raise zipfile.BadZipFile("not laid out as torch.save does")
    return int(count)


def _require_stored(record: zipfile.ZipInfo) -> None:
    is_storage = record.filename.split("/")[1:-1] == ["data"]
    if not is_storage and record.file_size > PICKLE_BYTES:  # readers take these whole
        raise zipfile.BadZipFile(f"record {record.filename!r} has {record.file_size:,} bytes")
    if record.compress_type != zipfile.ZIP_STORED or record.file_size != record.compress_size:
        raise zipfile.BadZipFile(f"record {record.filename!r} is not stored as it is")
    if record.external_attr & _DIRECTORY:
        raise zipfile.BadZipFile(f"record {record.filename!r} is marked as a directory")


def reason_of(error: Exception) -> str:
    """Return the first line of what an error says of an archive."""
    first_line = (str(error).splitlines() or [""])[0]
    return f"damaged archive: {first_line or type(error).__name__}"
