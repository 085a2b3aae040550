"""What travels in a parameter all-gather: contiguous bytes, and how many a logical element has."""

from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from moe_optim.errors import LayoutError


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GatherBuffer:
    """One tensor of a bucket as bytes. Buffers of all dtypes look the same to a collective.

    Everything on the wire is uint8 because a coalesced gather of mixed dtypes may return garbage.
    """

    name: str
    bytes_per_element: Fraction
    """Bytes for each logical element of the bucket: 2 for bf16, 1/2 for E2M1 data, 1/1024 for
    one scale byte a 32x32 block."""
    data: Tensor
    """[bytes] uint8, contiguous; a view, the buffer owns nothing."""

    def __post_init__(self) -> None:
        """Check that the bytes lie side by side and describe a whole number of elements.

        Raises:
            LayoutError: they do not.
        """
        if self.data.dtype != torch.uint8 or self.data.dim() != 1 or not self.data.is_contiguous():
            raise LayoutError(
                f"buffer {self.name}: expected contiguous bytes [n] torch.uint8, got "
                f"{list(self.data.shape)} {self.data.dtype} with strides "
                f"{list(self.data.stride())}. Make it with GatherBuffer.viewing."
            )
        if self.bytes_per_element <= 0 or (self.data.numel() / self.bytes_per_element) % 1:
            raise LayoutError(
                f"buffer {self.name}: expected a whole number of elements, got {self.data.numel()} "
                f"bytes at {self.bytes_per_element} bytes an element."
            )

    @classmethod
    def viewing(cls, name: str, tensor: Tensor) -> "GatherBuffer":
        """Return a buffer over the memory of ``tensor``, whose elements are logical ones; no copy.

        Args:
            name: how errors call the buffer.
            tensor: any shape and dtype, contiguous.

        Raises:
            LayoutError: the tensor is not contiguous, or empty.
        """
        if not tensor.is_contiguous():
            raise LayoutError(
                f"buffer {name}: expected a contiguous tensor, got {list(tensor.shape)} with "
                f"strides {list(tensor.stride())}. A view that gathers in place cannot be copied."
            )
        if not tensor.numel():
            raise LayoutError(f"buffer {name}: expected at least one element, got 0.")
        data = tensor.detach().view(-1).view(torch.uint8)
        return cls(name=name, bytes_per_element=Fraction(tensor.itemsize), data=data)

    @property
    def numel(self) -> int:
        """Logical elements that the buffer describes."""
        return int(self.data.numel() / self.bytes_per_element)

    def slice_of(self, rank: int, size: int) -> Tensor:
        """Return the bytes that ``rank`` of ``size`` ranks owns: [bytes / size] uint8, a view.

        Raises:
            LayoutError: no such rank, or the slices would not all be whole bytes.
        """
        if not 0 <= rank < size:
            raise LayoutError(f"buffer {self.name}: expected a rank below {size}, got {rank}.")
        slice_bytes, rest = divmod(self.data.numel(), size)
        if rest:
            raise LayoutError(
                f"buffer {self.name}: expected whole bytes for each of {size} ranks, got "
                f"{self.data.numel()} bytes ({self.numel} elements at {self.bytes_per_element} "
                f"bytes). Pad the bucket so that a shard of it has whole bytes in every buffer."
            )
        return self.data.narrow(0, rank * slice_bytes, slice_bytes)
