"""What lies behind a quantized expert weight, whoever owns the bytes."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, Protocol

import torch
from torch import Tensor

from moe_optim import ops
from moe_optim.errors import LayoutError, StateError
from moe_optim.formats import BlockScaledFormat, Direction, QuantizedWeight
from moe_optim.formats.reference.amax import expert_amax_into
from moe_optim.kernels.member_table import Backend, MemberTable, TableEntry
from moe_optim.places import Attributes, has_memory
from moe_optim.weights.handles import handle_of

_versions = count()


def new_version() -> int:
    """Return a version that no bytes of this process have had before."""
    return next(_versions)


class BindingBucket(Protocol):
    """The bucket that a weight is bound to: it knows what its gathers make of the weight."""

    @property
    def is_fresh(self) -> bool:
        """Whether the weight is that of the current masters."""

    @property
    def is_offloaded(self) -> bool:
        """Whether the bytes are on the host, and the memory of the buffers is free."""

    @property
    def version(self) -> int:
        """Grows with every gather, see :attr:`WeightStorage.version`."""

    def before_gradient(self) -> None:
        """Take note of a gradient of the weight that is about to be added up."""

    def note_initial(self) -> None:
        """Take note of initial values that the weight was given, for the next gather to drop."""


class GradientNote:
    """Hook of a weight by which its bucket learns of a gradient; it changes nothing.

    Args:
        storage: of the weight; it knows the bucket that binds it at the time.
    """

    def __init__(self, storage: "WeightStorage") -> None:
        self._storage = storage

    def __call__(self, _: Tensor) -> None:
        """Tell the bucket."""
        self._storage.before_gradient()


class WeightStorage(ABC):
    """What lies behind a quantized weight, whoever owns the bytes.

    Args:
        name: parameter name, for errors.
        quantized: the buffers; fields that share memory stay shared.
        backend: who quantizes what is written.

    Attributes:
        format: of the weight.
        shape: logical [E, R, C].
        laid_out: the buffers, also where their bytes are on the host: for addresses and shapes.
        recorded_amax: [E] fp32, written at each requantization; None where nobody asked, or the
            format has one.
        bucket: the bucket that was the last to bind the weight; None before there is one.
    """

    watched: tuple[Attributes, ...] | None = ()
    """What somebody could exchange, as :meth:`take_over` left it, which makes this anew. None where
    :meth:`has_moved` has to look at more."""

    def __init__(self, name: str, quantized: QuantizedWeight, backend: Backend) -> None:
        self.name = name
        self.laid_out = quantized
        self.format: BlockScaledFormat = quantized.format
        self.shape: tuple[int, int, int] = quantized.shape
        self.backend = backend
        self.recorded_amax: Tensor | None = None
        self.bucket: BindingBucket | None = None
        self._copied_stale = False  # from a weight that was behind its masters
        self._version = new_version()

    @property
    def quantized(self) -> QuantizedWeight:
        """The buffers that products read, and a requantization writes.

        Raises:
            StateError: the bytes are on the host.
        """
        self.require_present()
        return self.laid_out

    @property
    def is_fresh(self) -> bool:
        """Whether the bytes are those of the current masters, as far as there are some."""
        return not self._copied_stale if self.bucket is None else self.bucket.is_fresh

    @property
    def is_offloaded(self) -> bool:
        """Whether the bytes are on the host, and the memory of the buffers is free."""
        return self.bucket is not None and self.bucket.is_offloaded

    @property
    def version(self) -> int:
        """Grows with every write, and is that of no other bytes: copies alone share it."""
        return self._version if self.bucket is None else max(self._version, self.bucket.version)

    @property
    def amax(self) -> Tensor | None:
        """The largest magnitude of each expert when its bytes were written, [E] fp32, not a copy.

        It is that of the values rounded to bf16, NaN left out; NaN where the bytes were copied from
        a storage that did not record it. None where nothing is recorded.

        Raises:
            StateError: the bytes are on the host.
        """
        held = self.quantized
        return held.global_amax if self.recorded_amax is None else self.recorded_amax

    @property
    @abstractmethod
    def initial(self) -> Tensor | None:
        """What the bytes were quantized from, in any dtype, until masters have been made of it."""

    @initial.setter
    @abstractmethod
    def initial(self, values: Tensor | None) -> None: ...

    def _tell_of_initial(self, values: Tensor | None) -> None:
        if values is not None and self.bucket is not None:
            self.bucket.note_initial()

    @property
    def storage_scales(self) -> Mapping[Direction, Tensor]:
        """Padded scales that products read, by direction; none where they read the buffers."""
        return {}

    def copy_bytes_from(self, other: "WeightStorage") -> None:
        """Overwrite the buffers with those of ``other``, byte for byte.

        Raises:
            LayoutError: format or shape differ.
        """
        if (self.format, self.shape) != (other.format, other.shape):
            raise LayoutError(
                f"{self.name}: expected {self.format.name} {list(self.shape)}, got "
                f"{other.format.name} {list(other.shape)}. Copy values instead of bytes."
            )
        theirs = other.quantized.buffers()
        for name, buffer in self.quantized.buffers().items():
            buffer.copy_(theirs[name])
        if self.recorded_amax is not None:
            if other.amax is None:
                self.recorded_amax.fill_(torch.nan)
            else:
                self.recorded_amax.copy_(other.amax)
        self.note_write()

    def clone(self, device: torch.device | None = None) -> "PortableStorage":
        """Return a portable storage with its own copy of the same bytes, on ``device`` if given."""
        copy = PortableStorage(
            self.format,
            self.shape,
            name=self.name,
            device=device or self.device,
            record_amax=self.recorded_amax is not None,
            backend=self.backend,
        )
        copy.copy_bytes_from(self)
        copy.set_copy_of(self)
        return copy

    def set_copy_of(self, other: "WeightStorage") -> None:
        """Take freshness, initial values and version from ``other``, whose bytes these are too."""
        self._copied_stale, self._version = not other.is_fresh, other.version
        self.initial = other.initial

    @abstractmethod
    def pointers(self) -> tuple[int, ...]:
        """Return the address of everything that products read."""

    def has_moved(self) -> bool:
        """Return whether somebody gave the weight other tensors since the last :meth:`take_over`.

        Changes nothing.
        """
        return any(one.have_moved for one in self.watched or ())

    @abstractmethod
    def take_over(self) -> None:
        """Make tensors that somebody gave the weight those of this storage.

        Raises:
            StateError: data that a bucket gathers into is no longer the weight's, or the bytes are
                on the host.
        """

    @abstractmethod
    def bind(self, buffers: Mapping[str, Tensor], bucket: BindingBucket) -> None:
        """Move the bytes of some buffers into memory of a bucket, and stay there.

        Args:
            buffers: by field of ``QuantizedWeight``, of the same shapes and dtypes; filled with the
                present bytes, and aliased from then on. May be none.
            bucket: what :attr:`bucket` is from then on.

        Raises:
            StateError: the weight is offloaded.
        """

    @abstractmethod
    def whole_of(self, parts: "Sequence[WeightStorage]") -> "WeightStorage | None":
        """Return the storage that ``parts`` are all experts of, in order, if there is one."""

    def note_write(self) -> None:
        """Take note of bytes that somebody has put into all buffers."""
        self._version, self._copied_stale = new_version(), False

    @property
    def handle(self) -> Tensor:
        """By what compiled graphs know the storage."""
        return handle_of(self)

    @property
    def device(self) -> torch.device:
        """Where the buffers lie, or lay."""
        return self.laid_out.rowwise_data.device

    @torch.no_grad()
    def write(self, values: Tensor) -> None:
        """Quantize values into the buffers, in place.

        Args:
            values: [E, R, C] fp32 or bf16, any strides and device; left alone.

        Raises:
            LayoutError: another shape or dtype.
        """
        source = values.detach().to(self.device).contiguous()
        entry = TableEntry(
            parameter=self.name,
            source=source,
            target=self.quantized,
            storage_scales=self.storage_scales,
        )
        table = MemberTable.build([entry], backend=self.backend)
        table.launch()
        table.finish.launch()
        if self.recorded_amax is not None:
            _, rows, cols = self.shape
            expert_amax_into(self.recorded_amax.zero_(), source, 0, rows * cols)
        self._version, self._copied_stale = new_version(), False

    def drop_initial(self) -> None:
        """Free the initial values: masters have been made of others."""
        if self.initial is not None:
            self.initial = None

    def dequantize(self, direction: Direction = "rowwise") -> Tensor:
        """Return the values of one ``direction``, [E, R, C] bf16, newly allocated."""
        return ops.dequantize(self.quantized, direction)

    def memories(self) -> tuple[torch.UntypedStorage, ...]:
        """Return the memory behind everything that products read or a gather writes."""
        tensors = (*self.laid_out.buffers().values(), *self.storage_scales.values())
        return tuple(tensor.untyped_storage() for tensor in tensors)

    def before_gradient(self) -> None:
        """Tell the bucket that a gradient is about to be written into its memory."""
        if self.bucket is not None:
            self.bucket.before_gradient()

    def require_present(self) -> None:
        """Check that the bytes are here, whoever has sent them away.

        Views of experts and storages that a later bucket has bound share memory with what others
        offload, so that the memory is looked at, too.

        Raises:
            StateError: they are on the host.
        """
        if self.is_offloaded or not has_memory(self.laid_out.rowwise_data):
            raise StateError(
                f"{self.name}: expected the bytes of the weight, got none: they are offloaded. "
                "Call reload_from_cpu() on the buffers of the DDP module first."
            )

    def require_fresh(self) -> None:
        """Check that the bytes are those of the current masters.

        Raises:
            StateError: masters have moved since the bytes were written, or the bytes are on the
                host.
        """
        if self.is_offloaded or not self.is_fresh:
            self.require_present()
            raise StateError(
                f"{self.name}: expected the weights of the current masters, got those of an "
                "earlier step. Let the parameter gather run before they are read: keep the forward "
                "pre-hooks enabled, or call start_param_sync(force_sync=True) on the DDP module."
            )

    def require_writable(self) -> None:
        """Check that what is written now stays.

        Raises:
            StateError: a gather, begun or still to come, would overwrite it, or the bytes are on
                the host.
        """
        self.require_present()
        if self.bucket is not None and not self.is_fresh:
            raise StateError(
                f"{self.name}: expected weights of the current masters to write into, got those of "
                "an earlier step, which the parameter gather is going to overwrite. Call "
                "start_param_sync(force_sync=True) on the DDP module before values are loaded."
            )


class PortableStorage(WeightStorage):
    """Buffers in ordinary tensors, at their logical shapes, on any device.

    Args:
        format: block-scaled format.
        shape: logical [E, R, C].
        name: parameter name, for errors.
        device: where the buffers lie.
        record_amax: keep the amax of every expert at each requantization. Formats with a global
            amax do so always.
        backend: who quantizes what is written.

    Raises:
        LayoutError: ``shape`` does not fit the format.
    """

    def __init__(
        self,
        format: BlockScaledFormat,
        shape: tuple[int, int, int],
        *,
        name: str = "weight",
        device: torch.device | str | None = None,
        record_amax: bool = False,
        backend: Backend = "auto",
    ) -> None:
        super().__init__(
            name, QuantizedWeight.empty(format, shape, device=device, name=name), backend
        )
        self.initial = None
        self._whole: tuple[PortableStorage, int] | None = None  # and which expert of it this is
        if record_amax and not format.has_global_amax:
            self.recorded_amax = torch.zeros(shape[:1], dtype=torch.float32, device=device)

    @classmethod
    def viewing(
        cls, quantized: QuantizedWeight, name: str = "weight", backend: Backend = "auto"
    ) -> "PortableStorage":
        """Return a storage over buffers that somebody else allocated; nothing is copied.

        Args:
            quantized: the buffers.
            name: parameter name, for errors.
            backend: who quantizes what is written.
        """
        storage = cls.__new__(cls)
        WeightStorage.__init__(storage, name, quantized, backend)
        storage.initial = storage._whole = None
        return storage

    @property
    def initial(self) -> Tensor | None:
        """What the bytes were quantized from, in any dtype, until masters have been made of it."""
        return self._initial

    @initial.setter
    def initial(self, values: Tensor | None) -> None:
        self._tell_of_initial(values)
        self._initial = values

    def pointers(self) -> tuple[int, ...]:
        """Return the address of every buffer."""
        return tuple(tensor.data_ptr() for tensor in self.laid_out.buffers().values())

    def take_over(self) -> None:
        """Do nothing: nobody gives the weight other buffers."""

    def bind(self, buffers: Mapping[str, Tensor], bucket: BindingBucket) -> None:
        """Move the bytes of some buffers into memory of a bucket, and stay there.

        A bound storage is no longer part of the one it may have been cut from, whose bytes it no
        longer shares.

        Args:
            buffers: by field of ``QuantizedWeight``, of the same shapes and dtypes; filled with the
                present bytes, and aliased from then on. May be none.
            bucket: what :attr:`bucket` is from then on.

        Raises:
            StateError: the weight is offloaded.
        """
        held = self.quantized
        for name, buffer in buffers.items():
            buffer.copy_(getattr(held, name))
        both: dict[str, Any] = dict(buffers)
        if "rowwise_data" in buffers and self.format.columnwise_copy == "shared":
            both["columnwise_data"] = buffers["rowwise_data"]
        self.laid_out = replace(held, **both)
        self.bucket = bucket
        if buffers:
            self._whole = None

    def expert(self, index: int) -> "PortableStorage":
        """Return a storage [1, R, C] over the buffers of one expert; the memory is shared.

        Args:
            index: of the expert, from 0 on.

        Raises:
            LayoutError: there is no such expert.
        """
        whole, one = self.quantized, slice(index, index + 1)
        view = QuantizedWeight(
            format=whole.format,
            shape=(1, *whole.shape[1:]),
            rowwise_data=whole.rowwise_data[one],
            rowwise_scale=whole.rowwise_scale[one],
            columnwise_data=whole.columnwise_data[one],
            columnwise_scale=whole.columnwise_scale[one],
            global_amax=None if whole.global_amax is None else whole.global_amax[one],
        )
        expert = PortableStorage.viewing(view, f"{self.name}{index}", self.backend)
        expert._whole = (self, index)
        if self.recorded_amax is not None:
            expert.recorded_amax = self.recorded_amax[one]
        return expert

    def __deepcopy__(self, memo: dict[int, Any]) -> "PortableStorage":
        """Copy the bytes; experts of one storage become experts of one copy."""
        self.require_present()
        if self._whole is None:
            new = self.clone()
        else:
            whole, index = self._whole
            new = copy.deepcopy(whole, memo).expert(index)
            new.set_copy_of(self)
        memo[id(self)] = new
        return new

    def whole_of(self, parts: Sequence[WeightStorage]) -> WeightStorage | None:
        """Return the storage that ``parts`` are all experts of, in order, if there is one."""
        if len(parts) == 1 and self._whole is None:
            return self
        if self._whole is None:
            return None
        whole, _ = self._whole
        places = [part._whole for part in parts if isinstance(part, PortableStorage)]
        return whole if places == [(whole, index) for index in range(whole.shape[0])] else None


class MakeStorages(Protocol):
    """Makes the storages of one linear's weights, not written yet."""

    def __call__(
        self,
        format: BlockScaledFormat,
        shape: tuple[int, int, int],
        *,
        apart: bool,
        name: str,
        device: torch.device | str | None,
        record_amax: bool,
        backend: Backend,
    ) -> Sequence[WeightStorage]:
        """Return one storage of ``shape``, or one an expert if ``apart``."""


def make_portable_storages(
    format: BlockScaledFormat,
    shape: tuple[int, int, int],
    *,
    apart: bool,
    name: str,
    device: torch.device | str | None,
    record_amax: bool,
    backend: Backend,
) -> Sequence[WeightStorage]:
    """Return one storage [E, R, C], or one an expert over its buffers.

    Raises:
        LayoutError: ``shape`` does not fit the format.
    """
    whole = PortableStorage(
        format, shape, name=name, device=device, record_amax=record_amax, backend=backend
    )
    return [whole.expert(index) for index in range(shape[0])] if apart else [whole]
