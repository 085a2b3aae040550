"""Archives written by ``torch.save``: checksum verification, and reading of one tensor or object.

An archive is a zip of uncompressed records, each with a CRC-32 that ``torch.load`` does not verify.
A torch_dist checkpoint stores many archives back to back in one file.

``torch.load`` is not used: it runs archives that look like TorchScript. Values are read at the
offsets in the archive's table into memory of the expected size; nothing is unpickled, and no size
that only the archive states is allocated.
"""

import ctypes
import os
import struct
import zipfile
from dataclasses import dataclass
from math import prod
from typing import IO, TYPE_CHECKING, Any

from moe_optim.checkpoint.files.metadata import Shape, checked_shape
from moe_optim.checkpoint.files.pickles import ITEM_BYTES, STORAGES, read_pickle

try:
    from isal.isal_zlib import crc32  # three times as fast
except ImportError:
    from zlib import crc32

if TYPE_CHECKING:
    from torch import Tensor

BLOCK_BYTES = 4 * 2**20
"""Read size in bytes, which bounds the memory of a check."""
PICKLE_BYTES = 16 * 2**20
"""Limit for records other than tensor storage, in bytes."""

_DIRECTORY = 0x10  # MS-DOS attribute; torch's reader silently skips the content of such records
_ENCRYPTED = 0x61  # flag bits: encrypted, patch, strongly encrypted
_UTF8 = 0x800  # flag bit: names are UTF-8
_TABLE_BYTES = 16 * 2**20
_FIRST, _END, _END64, _LOCATOR64 = (b"PK" + code for code in (b"\3\4", b"\5\6", b"\6\6", b"\6\7"))
_END_FORM = struct.Struct("<4s4H2IH")
_END64_FORM = struct.Struct("<4sQ2H2I4Q")
_LOCATOR64_FORM = struct.Struct("<4sIQI")
_HEADER_FORM = struct.Struct("<4s22xHH")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Description of the tensor in an archive, verified against its record."""

    dtype: str
    """Dtype as torch prints it: ``torch.bfloat16``."""
    shape: Shape
    stride: Shape
    start: int
    """Storage offset in elements."""
    record: str
    nbytes: int
    """Size of the record in bytes."""

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


class Archive:
    """An open archive.

    Compares the CRC-32 of every record that it reads, unless ``compares`` is False.
    """

    def __init__(self, stream: IO[bytes], *, compares: bool = True) -> None:
        """Read the table at the end of a seekable stream; BadZipFile if it is damaged."""
        self.stream, self._compares = stream, compares
        count = _count_records(stream)
        stream.seek(0)
        self._table = zipfile.ZipFile(stream).infolist()
        self.records = {record.filename.partition("/")[2]: record for record in self._table}
        """Records by name, without the common folder."""
        are_names = len({record.filename.partition("/")[0] for record in self._table}) == 1
        is_whole = len(self.records) == len(self._table) == count
        if not (are_names and is_whole and "data.pkl" in self.records):
            raise zipfile.BadZipFile("not the records that torch.save writes")
        if "constants.pkl" in self.records:
            raise zipfile.BadZipFile("a TorchScript program, which is no part of a checkpoint")
        for record in self._table:
            _require_stored(record)
        if sum([record.file_size for record in self._table]) > stream.seek(0, os.SEEK_END):
            raise zipfile.BadZipFile("records that lie over each other")

    def pickled(self) -> bytes:
        """Return the pickle of the archive; BadZipFile for a wrong CRC."""
        return self._content(self.records["data.pkl"])

    def load(self) -> Any:
        """Return the object, see :func:`read_pickle`; damaged archives raise arbitrary errors."""
        return read_pickle(self.pickled())

    def compare_checksums(self) -> None:
        """Verify the CRC-32 of every record, and that torch's zip reader would read the same bytes.

        Reads every record once, in blocks. Raises BadZipFile.
        """
        import torch  # slow import, not needed to check metadata

        for record in self._table:
            self._read(record)
        self.stream.seek(0)
        reader: Any = torch._C.PyTorchFileReader(self.stream)
        if set(reader.get_all_records()) != self.records.keys():
            raise zipfile.BadZipFile("torch reads other records")
        for name, record in self.records.items():
            if reader.get_record_offset(name) != self._place_of(record):
                raise zipfile.BadZipFile(f"torch reads {name!r} elsewhere")

    def rows(self) -> bytes:
        """Return name, offset, size and CRC-32 of every record, as text.

        Archives with equal rows and valid CRCs have equal content.
        """
        table = self._table
        return repr(
            [(row.filename, row.header_offset, row.file_size, row.CRC) for row in table]
        ).encode()

    def table_checksum(self) -> str:
        """Return the CRC-32 of :meth:`rows`, 8 hexadecimal digits."""
        return f"{crc32(self.rows()):08x}"

    def require_tensor(self, dtype: str, shape: Shape) -> None:
        """Raise ValueError unless the archive holds exactly one tensor of this dtype and shape."""
        tensor = self._describe(dtype, shape)
        if tensor.nbytes != prod(shape) * ITEM_BYTES[dtype]:
            raise ValueError(f"{tensor.nbytes:,} bytes in place of those of {tensor}")

    def read_tensor(self, dtype: str, shape: Shape, into: "Tensor | None" = None) -> "Tensor":
        """Return the values of the only tensor in the archive, contiguous; reads them once.

        Args:
            dtype: expected dtype, as torch prints it.
            shape: expected shape.
            into: contiguous CPU tensor of both, which receives the values and is returned.

        Raises:
            ValueError: archive holds another tensor or object.
            BadZipFile: a record has another CRC-32 than the table.
            EOFError: archive is cut off.
        """
        import torch

        tensor = self._describe(dtype, shape)
        strides = tuple([prod(shape[axis + 1 :]) for axis in range(len(shape))])
        is_whole = tensor.nbytes == prod(shape) * ITEM_BYTES[dtype]
        is_plain = is_whole and tensor.start == 0 and tensor.stride == strides
        if into is not None and is_plain:
            memory = into.view(-1).view(torch.uint8)
        else:
            memory = torch.empty(tensor.nbytes, dtype=torch.uint8, device="cpu")
        self._read(self.records[tensor.record], bytes_of(memory))
        values = memory.view(getattr(torch, dtype.removeprefix("torch.")))
        values = values.as_strided(shape, tensor.stride, tensor.start)
        return values.contiguous() if into is None or is_plain else into.copy_(values)

    def _describe(self, dtype: str, shape: Shape) -> StoredTensor:
        value = self.load()
        try:
            tensor = _described(value)
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise ValueError("expected one tensor, got another object") from error
        record = self.records.get(tensor.record)
        size = record.file_size if record else 0
        if size != tensor.nbytes:
            raise ValueError(f"{size:,} bytes of a tensor of {tensor.nbytes:,}")
        steps = zip(tensor.shape, tensor.stride, strict=True)
        last = tensor.start + sum([(extent - 1) * step for extent, step in steps])
        if prod(tensor.shape) and last >= tensor.nbytes // ITEM_BYTES[tensor.dtype]:
            raise ValueError("elements outside of the bytes of their tensor")
        order = self.records.get("byteorder")
        if order and not (order.file_size == 6 and self._content(order) == b"little"):
            raise ValueError("numbers that are not little-endian")
        if (tensor.dtype, tensor.shape) != (dtype, shape):
            raise ValueError(f"{tensor} in place of a tensor of {dtype} {shape}")
        return tensor

    def _content(self, record: zipfile.ZipInfo) -> bytes:
        content = bytearray(record.file_size)
        self._read(record, memoryview(content))
        return bytes(content)

    def _read(self, record: zipfile.ZipInfo, memory: memoryview | None = None) -> None:
        """Read a record into memory of its size, or into none, and compare its CRC-32."""
        self.stream.seek(self._place_of(record))
        scratch = memoryview(bytearray(min(BLOCK_BYTES, record.file_size if memory is None else 0)))
        checksum = 0
        for at in range(0, record.file_size, BLOCK_BYTES):
            size = min(BLOCK_BYTES, record.file_size - at)
            block = scratch[:size] if memory is None else memory[at : at + size]
            if self.stream.readinto(block) < size:  # type: ignore[attr-defined]
                raise EOFError("an archive that ends too early")
            checksum = crc32(block, checksum) if self._compares else record.CRC
        if self._compares and checksum != record.CRC:
            raise zipfile.BadZipFile(f"Bad CRC-32 of record {record.filename!r}")

    def _place_of(self, record: zipfile.ZipInfo) -> int:
        self.stream.seek(record.header_offset)
        first, of_name, of_extra = _HEADER_FORM.unpack(self.stream.read(_HEADER_FORM.size))
        encoding = "utf-8" if record.flag_bits & _UTF8 else "cp437"
        name = self.stream.read(of_name).decode(encoding)
        if first != _FIRST or name != record.orig_filename:
            raise zipfile.BadZipFile(f"record {record.filename!r} is not where the table has it")
        return record.header_offset + _HEADER_FORM.size + int(of_name + of_extra)


def bytes_of(tensor: "Tensor") -> memoryview:
    """Return the writable bytes of a contiguous CPU tensor, which they keep alive.

    ``Tensor.numpy`` gives them, too, and makes ``resize_`` of the storage fail from then on, which
    offloading the buffers of DDP calls.
    """
    if not tensor.numel():
        return memoryview(bytearray())
    memory: Any = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    memory.owner = tensor
    return memoryview(memory).cast("B")


def reason_of(error: Exception) -> str:
    """Return the first line of an archive error."""
    first_line = (str(error).splitlines() or [""])[0]
    return f"damaged archive: {first_line or type(error).__name__}"


def _described(value: Any) -> StoredTensor:
    """Parse the arguments of torch's ``_rebuild_*`` functions."""
    if str(value.by) == "torch._utils._rebuild_parameter":
        value = value.args[0]
    storage, start, shape, stride, _, _, *more = value.args
    _, kind, key, _, count = storage.words
    if str(value.by) == "torch._utils._rebuild_tensor_v3":
        dtype, nbytes = str(more.pop(0)), count
    elif str(value.by) == "torch._utils._rebuild_tensor_v2":
        dtype = f"torch.{STORAGES[kind.name]}"
        nbytes = count * ITEM_BYTES[dtype]
    else:
        raise TypeError("no tensor")
    if dtype not in ITEM_BYTES or any(more) or not isinstance(key, str):
        raise TypeError("a tensor of another dtype, or one that is to be conjugated")
    checked_shape((start,))
    checked_shape((nbytes,))
    record = f"data/{key}"
    return StoredTensor(dtype, checked_shape(shape), checked_shape(stride), start, record, nbytes)


def _count_records(stream: IO[bytes]) -> int:
    """Return the number of records that an archive declares.

    Refuses archives in which different zip readers could find different tables (readers search for
    the end record backwards, then either follow its offset or take the bytes before it), and files
    that do not begin as a zip, which torch would read as a bare pickle.
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
    if not is_storage and record.file_size > PICKLE_BYTES:  # readers load these whole
        raise zipfile.BadZipFile(f"record {record.filename!r} has {record.file_size:,} bytes")
    is_plain = record.compress_type == zipfile.ZIP_STORED and not record.flag_bits & _ENCRYPTED
    if not is_plain or record.file_size != record.compress_size:
        raise zipfile.BadZipFile(f"record {record.filename!r} is not stored as it is")
    if record.external_attr & _DIRECTORY:
        raise zipfile.BadZipFile(f"record {record.filename!r} is marked as a directory")
