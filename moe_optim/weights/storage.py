"""What lies behind a quantized expert weight, whoever owns the bytes."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import count
from typing import Any, Protocol

import torch
from torch import Tensor

from moe_optim import ops
from moe_optim.errors import LayoutError, StateError
from moe_optim.formats import BlockScaledFormat, Direction, QuantizedWeight
from moe_optim.formats.reference.amax import expert_amax_into
from moe_optim.kernels.member_table import Backend, MemberTable, TableEntry
from moe_optim.places import has_memory

MakeStorages = Callable[..., "Sequence[WeightStorage]"]
"""Makes the storages of one linear's weights, as :func:`make_portable_storages`."""
_versions = count()


def new_version() -> int:
    """Return a version that no bytes of this process have had before."""
    return next(_versions)


class Weights(Enum):
    """What quantized weights are to their masters."""

    FRESH = "weights of the current masters"
    STALE = "weights of earlier masters"
    MOVING = "weights whose masters are moving"
    ENCODED = "weights of the current masters in the slices of this rank alone"
    IN_FLIGHT = "weights in flight"
    OFFLOADED = "weights on the host"
    STALE_OFFLOADED = "weights of earlier masters on the host"


OFFLOADED = (Weights.OFFLOADED, Weights.STALE_OFFLOADED)


@dataclass(eq=False)
class WeightState:
    """The state of weights: of a bucket, or of one that is in none, and a copy of stale ones."""

    weights: Weights = Weights.FRESH


class BindingBucket(Protocol):
    """The bucket that a weight is bound to: it knows what its gathers make of the weight."""

    @property
    def state(self) -> WeightState:
        """The state of all weights in the bucket."""

    @property
    def version(self) -> int:
        """Grows with every gather, see :attr:`WeightStorage.version`."""

    def before_gradient(self) -> None:
        """Take note of a gradient of the weight that is about to be added up."""

    def note_initial(self) -> None:
        """Take note of initial values that the weight was given, for the next gather to drop."""


class Watched(Protocol):
    """Tensors that somebody may exchange."""

    @property
    def have_moved(self) -> bool:
        """Whether they are others by now, or lie elsewhere."""


class WeightStorage(ABC):
    """What lies behind a quantized weight, whoever owns the bytes.

    Args:
        name: parameter name, for errors.
        quantized: data and scales; fields that share memory stay shared.
        backend: who quantizes what is written.

    Attributes:
        format: format of the weight.
        shape: logical [E, R, C].
        laid_out: data and scales, also where their bytes are on the host: for addresses and shapes.
        recorded_amax: [E] fp32, written at each requantization; None where nobody asked, or the
            format has one.
        bucket: the bucket that was the last to bind the weight; None before there is one.
        state: state of that bucket, else the weight's own.
        watched: tensors that somebody could exchange, as :meth:`take_over` left them.
    """

    watched: Sequence[Watched] = ()
    _initial: Tensor | None = None

    def __init__(self, name: str, quantized: QuantizedWeight, backend: Backend) -> None:
        self.name = name
        self.laid_out = quantized
        self.format: BlockScaledFormat = quantized.format
        self.shape: tuple[int, int, int] = quantized.shape
        self.backend = backend
        self.recorded_amax: Tensor | None = None
        self.bucket: BindingBucket | None = None
        self.state = WeightState()
        self._version = new_version()

    @property
    def quantized(self) -> QuantizedWeight:
        """Data and scales that GEMMs read, and a requantization writes.

        Raises:
            StateError: the bytes are on the host.
        """
        self.require_present()
        return self.laid_out

    @property
    def is_fresh(self) -> bool:
        """Whether the bytes are those of the current masters, as far as there are some."""
        return self.state.weights is Weights.FRESH

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
    def initial(self) -> Tensor | None:
        """What the bytes were quantized from, in any dtype, until masters have been made of it."""
        return self._initial

    @initial.setter
    def initial(self, values: Tensor | None) -> None:
        if values is not None and self.bucket is not None:
            self.bucket.note_initial()
        self._initial = values

    @property
    def storage_scales(self) -> Mapping[Direction, Tensor]:
        """Padded scales that GEMMs read, by direction; none where they read the buffers."""
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
        self._version, self.initial = other.version, other.initial
        if self.bucket is None:
            self.state = WeightState(Weights.FRESH if other.is_fresh else Weights.STALE)

    def has_moved(self) -> bool:
        """Return whether somebody gave the weight other tensors since the last :meth:`take_over`.

        Changes nothing.
        """
        return any(one.have_moved for one in self.watched)

    def take_over(self) -> None:  # noqa: B027  # nothing where nobody exchanges any
        """Make tensors that somebody gave the weight those of this storage.

        Raises:
            StateError: data that a bucket gathers into is no longer the weight's, or the bytes are
                on the host.
        """

    def bind(self, buffers: Mapping[str, Tensor], bucket: BindingBucket) -> None:
        """Move the bytes of some buffers into memory of a bucket, and stay there.

        Args:
            buffers: field of ``QuantizedWeight`` -> memory of the same shape and dtype; filled with
                the present bytes, and aliased from then on. May be none.
            bucket: value of :attr:`bucket` from then on.

        Raises:
            StateError: the weight is offloaded.
        """
        held, both = self.quantized, dict(buffers)
        for name, buffer in buffers.items():
            buffer.copy_(getattr(held, name))
        if "rowwise_data" in buffers and self.format.columnwise_copy == "shared":
            both["columnwise_data"] = buffers["rowwise_data"]
        self.laid_out = replace(held, **both)  # type: ignore[arg-type]
        self.bucket, self.state = bucket, bucket.state

    @abstractmethod
    def whole_of(self, parts: "Sequence[WeightStorage]") -> "WeightStorage | None":
        """Return the storage that ``parts`` are all experts of, in order, if there is one."""

    def note_write(self) -> None:
        """Take note of bytes that somebody has put into all buffers."""
        self._version = new_version()
        if self.bucket is None:
            self.state = WeightState()

    @property
    def device(self) -> torch.device:
        """Device of the buffers, also while their bytes are away."""
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
        WeightStorage.note_write(self)  # the scales of a subclass have been written, too

    def dequantize(self, direction: Direction = "rowwise") -> Tensor:
        """Return the values of one ``direction``, [E, R, C] bf16, newly allocated."""
        return ops.dequantize(self.quantized, direction)

    def memories(self) -> tuple[torch.UntypedStorage, ...]:
        """Return the memory behind everything that GEMMs read or a gather writes."""
        tensors = (*self.laid_out.buffers().values(), *self.storage_scales.values())
        return tuple(tensor.untyped_storage() for tensor in tensors)

    def before_gradient(self) -> None:
        """Tell the bucket that a gradient is about to be written into its memory."""
        if self.bucket is not None:
            self.bucket.before_gradient()

    def require_present(self) -> None:
        """Check that the bytes are here, whoever has sent them away.

        Views of experts and storages that a later bucket has bound share memory with what others
        offload, so that the memory is checked, too.

        Raises:
            StateError: they are on the host.
        """
        if self.state.weights in OFFLOADED or not has_memory(self.laid_out.rowwise_data):
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
        if self.state.weights is not Weights.FRESH:
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
        device: device of the buffers.
        record_amax: keep the amax of every expert at each requantization. Formats with a global
            amax do so always.
        backend: who quantizes what is written.

    Raises:
        LayoutError: ``shape`` does not fit the format.
    """

    _whole: "tuple[PortableStorage, int] | None" = None
    """The storage that this is an expert of, and which one."""

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
        return storage

    def bind(self, buffers: Mapping[str, Tensor], bucket: BindingBucket) -> None:
        """Move the bytes of some buffers into memory of a bucket, and stay there.

        A bound storage is no longer part of the one it may have been cut from, whose bytes it no
        longer shares.

        Args:
            buffers: see :meth:`WeightStorage.bind`.
            bucket: value of :attr:`bucket` from then on.
        """
        super().bind(buffers, bucket)
        if buffers:
            self._whole = None

    def expert(self, index: int) -> "PortableStorage":
        """Return a storage [1, R, C] over the buffers of one expert; the memory is shared.

        Args:
            index: number of the expert, from 0 on.

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
    """Return one storage [E, R, C], or one an expert over its buffers if ``apart``; unwritten.

    Raises:
        LayoutError: ``shape`` does not fit the format.
    """
    whole = PortableStorage(
        format, shape, name=name, device=device, record_amax=record_amax, backend=backend
    )
    return [whole.expert(index) for index in range(shape[0])] if apart else [whole]
