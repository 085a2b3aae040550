"""An archive that holds one tensor: what it says of it, and reading its values.

The values are read where the table of the archive has them, into memory of the size that was
expected; nothing is unpickled or allocated for what an archive alone says.
"""

from dataclasses import dataclass
from math import prod
from typing import IO, TYPE_CHECKING, Any

from moe_optim.checkpoint.files.archives import Archive, reason_of
from moe_optim.checkpoint.files.plain_pickles import Named, read_pickle
from moe_optim.checkpoint.files.stored_metadata import ITEM_BYTES, Shape, checked_shape

if TYPE_CHECKING:
    from torch import Tensor

_TYPED, _UNTYPED, _PARAMETER = (
    Named("torch._utils", f"_rebuild_{kind}") for kind in ("tensor_v2", "tensor_v3", "parameter")
)
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
"""Classes of storages of one dtype each, by their names in torch."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """What an archive says of its tensor. All of it lies within the record."""

    dtype: str
    """As torch prints it: ``torch.bfloat16``."""
    shape: Shape
    stride: Shape
    start: int
    """Elements before its first."""
    record: str
    nbytes: int
    """Of the record."""

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


def describe_tensor(archive: Archive) -> StoredTensor:
    """Return what an archive says of the one tensor in it.

    Raises:
        ValueError: it holds something else, or elements are said to lie outside of the record.
    """
    value = read_pickle(archive.pickled())
    try:
        tensor = _described(value)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError("something else than a tensor") from error
    size = archive.size_of(tensor.record)
    if size != tensor.nbytes:
        raise ValueError(f"{size or 0:,} bytes of a tensor of {tensor.nbytes:,}")
    steps = zip(tensor.shape, tensor.stride, strict=True)
    last = tensor.start + sum((extent - 1) * step for extent, step in steps)
    if prod(tensor.shape) and last >= tensor.nbytes // ITEM_BYTES[tensor.dtype]:
        raise ValueError("elements outside of the bytes of their tensor")
    if not archive.is_little_endian:
        raise ValueError("numbers that are not little-endian")
    return tensor


def _described(value: Any) -> StoredTensor:
    """Return what the arguments of torch's own functions say."""
    if value.by == _PARAMETER:
        value = value.args[0]
    storage, start, shape, stride, _, _, *more = value.args
    _, kind, key, _, count = storage.words
    if value.by == _UNTYPED:
        dtype, nbytes = str(more.pop(0)), count
    elif value.by == _TYPED:
        dtype = f"torch.{STORAGES[kind.name]}"
        nbytes = count * ITEM_BYTES[dtype]
    else:
        raise TypeError("something else")
    if dtype not in ITEM_BYTES or any(more) or not isinstance(key, str):
        raise TypeError("a tensor of another dtype, or one that is to be conjugated")
    checked_shape((start,))
    checked_shape((nbytes,))
    record = f"data/{key}"
    return StoredTensor(dtype, checked_shape(shape), checked_shape(stride), start, record, nbytes)


def tensor_defect(stream: IO[bytes], dtype: str, shape: Shape) -> str | None:
    """Say how an archive differs from that of one tensor of ``shape``; None if it does not.

    Reads how the tensor is described, and not its values. ``dtype`` is as torch prints it.
    """
    try:
        tensor = describe_tensor(Archive(stream))
    except Exception as error:  # a damaged zip makes zipfile raise nearly anything
        return reason_of(error)
    if (tensor.dtype, tensor.shape) != (dtype, shape):
        return f"expected a tensor of {dtype} {shape}, got {tensor}"
    is_whole = tensor.nbytes == prod(shape) * ITEM_BYTES[dtype]
    return None if is_whole else f"expected the bytes of {tensor}, got {tensor.nbytes} of them"


def read_tensor(stream: IO[bytes], dtype: str, shape: Shape) -> "Tensor":
    """Return the values of the one tensor of an archive, contiguous.

    ``dtype``, as torch prints it, and ``shape`` are what is expected.

    Raises:
        ValueError: it holds another tensor, or something else.
        EOFError: it ends too early.
    """
    import torch

    archive = Archive(stream)
    tensor = describe_tensor(archive)
    if (tensor.dtype, tensor.shape) != (dtype, shape):
        raise ValueError(f"{tensor} in place of a tensor of {dtype} {shape}")
    memory = torch.empty(tensor.nbytes, dtype=torch.uint8, device="cpu")
    archive.read_into(tensor.record, memoryview(memory.numpy()))
    values = memory.view(getattr(torch, dtype.removeprefix("torch.")))
    return values.as_strided(shape, tensor.stride, tensor.start).contiguous()
