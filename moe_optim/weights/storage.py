"""Storage of quantized expert weights, portable or owned by another library."""

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
from moe_optim.formats.reference.blocks import expert_amax_into
from moe_optim.kernels.member_table import Backend, MemberTable, TableEntry
from moe_optim.places import has_memory

MakeStorages = Callable[..., "Sequence[WeightStorage]"]
"""Factory of the storages of one linear's weights, such as :func:`make_portable_storages`."""
VERSIONS = count()
"""Versions of bytes, each unique in this process."""


class Weights(Enum):
    """State of quantized weights relative to their masters."""

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
    """Mutable state of the weights of a bucket, or of an unbound weight or copy."""

    weights: Weights = Weights.FRESH


class BindingBucket(Protocol):
    """Bucket that a weight is bound to."""

    @property
    def state(self) -> WeightState:
        """State of all weights in the bucket."""

    @property
    def version(self) -> int:
        """Version that grows with every gather, see :attr:`WeightStorage.version`."""

    def before_gradient(self) -> None:
        """Prepare for a gradient of the weight to be accumulated."""

    def note_initial(self) -> None:
        """Record that the weight received initial values, which the next gather drops."""


class Watched(Protocol):
    """Tensors that other code may replace."""

    @property
    def have_moved(self) -> bool:
        """Whether a tensor was replaced or has moved."""


class WeightStorage(ABC):
    """Storage of a quantized weight, portable or owned by another library.

    Args:
        name: parameter name, for errors.
        quantized: data and scales; fields that share memory stay shared.
        backend: backend that quantizes written values.

    Attributes:
        format: format of the weight.
        shape: logical [E, R, C].
        laid_out: data and scales, valid for addresses and shapes even while offloaded.
        recorded_amax: amax per expert, [E] fp32, written at each requantization; None if not
            requested, or if the format has a global amax.
        bucket: last bucket that bound the weight, or None.
        state: state of that bucket, else of the weight itself.
        watched: tensors that other code could replace, as of the last :meth:`take_over`.
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
        self._version = next(VERSIONS)

    @property
    def quantized(self) -> QuantizedWeight:
        """Data and scales that GEMMs read and a requantization writes; StateError if offloaded."""
        self.require_present()
        return self.laid_out

    @property
    def is_fresh(self) -> bool:
        """Whether the bytes match the current masters, if there are any."""
        return self.state.weights is Weights.FRESH

    @property
    def version(self) -> int:
        """Version of the bytes, growing with every write; only copies share one."""
        return self._version if self.bucket is None else max(self._version, self.bucket.version)

    @property
    def amax(self) -> Tensor | None:
        """Amax of each expert when its bytes were written, [E] fp32, not a copy.

        Values are rounded to bf16 and NaN is ignored. NaN if the bytes were copied from a storage
        that did not record it. None if not recorded. StateError if offloaded.
        """
        held = self.quantized
        return held.global_amax if self.recorded_amax is None else self.recorded_amax

    @property
    def initial(self) -> Tensor | None:
        """Values that the bytes were quantized from, in any dtype, until masters are created."""
        return self._initial

    @initial.setter
    def initial(self, values: Tensor | None) -> None:
        if values is not None and self.bucket is not None:
            self.bucket.note_initial()
        self._initial = values

    @property
    def storage_scales(self) -> Mapping[Direction, Tensor]:
        """Padded scales that GEMMs read, by direction; empty if GEMMs read the scale buffers."""
        return {}

    def copy_bytes_from(self, other: "WeightStorage") -> None:
        """Overwrite the buffers with those of ``other``, of the same format and shape."""
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
        """Return a portable storage with a copy of the bytes, on ``device`` if given."""
        copy = self.empty_like(device or self.device)
        copy.copy_bytes_from(self)
        copy.set_copy_of(self)
        return copy

    def empty_like(self, device: torch.device) -> "PortableStorage":
        """Return a portable storage on ``device`` with uninitialized bytes."""
        return PortableStorage(
            self.format,
            self.shape,
            name=self.name,
            device=device,
            record_amax=self.recorded_amax is not None,
            backend=self.backend,
        )

    def set_copy_of(self, other: "WeightStorage") -> None:
        """Adopt freshness, initial values and version of ``other``, after copying its bytes."""
        self._version, self.initial = other.version, other.initial
        if self.bucket is None:
            self.state = WeightState(Weights.FRESH if other.is_fresh else Weights.STALE)

    def has_moved(self) -> bool:
        """Return whether tensors of the weight were replaced since the last :meth:`take_over`."""
        return any(one.have_moved for one in self.watched)

    def take_over(self) -> None:  # noqa: B027  # no-op unless tensors can be replaced
        """Adopt tensors that other code assigned; StateError if it replaced a bucket's data."""

    def read_anew(self) -> None:  # noqa: B027  # no-op unless modules load into other tensors
        """Adopt what a module has loaded in place into a weight without a bucket."""

    def bind(self, buffers: Mapping[str, Tensor], bucket: BindingBucket) -> None:
        """Move the bytes of some buffers into memory of a bucket, and alias that memory.

        Args:
            buffers: map from field of ``QuantizedWeight`` to memory of the same shape and dtype,
                which receives the current bytes. May be empty.
            bucket: new value of :attr:`bucket`.

        Raises:
            StateError: the weight is offloaded.
        """
        held, both = self.quantized, dict(buffers)
        for name, buffer in buffers.items():
            buffer.copy_(getattr(held, name))
        for kind in ("data", "scale"):  # fields that share memory stay shared
            rowwise, columnwise = f"rowwise_{kind}", f"columnwise_{kind}"
            if rowwise in buffers and columnwise not in self.format.buffer_names:
                both[columnwise] = buffers[rowwise]
        self.laid_out = replace(held, **both)  # type: ignore[arg-type]
        self.bucket, self.state = bucket, bucket.state

    @abstractmethod
    def whole_of(self, parts: "Sequence[WeightStorage]") -> "WeightStorage | None":
        """Return the storage whose experts are exactly ``parts``, in order, or None."""

    def note_write(self) -> None:
        """Record that all buffers were overwritten."""
        self._version = next(VERSIONS)
        if self.bucket is None:
            self.state = WeightState()

    @property
    def device(self) -> torch.device:
        """Device of the buffers, also while offloaded."""
        return self.laid_out.rowwise_data.device

    @torch.no_grad()
    def write(self, values: Tensor) -> None:
        """Quantize ``values``, [E, R, C] fp32 or bf16, any strides and device, into the buffers."""
        source = values.detach().to(self.device).resolve_neg().contiguous()
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
        WeightStorage.note_write(self)  # subclass: scales are already expanded

    def dequantize(self, direction: Direction = "rowwise") -> Tensor:
        """Return the values of one ``direction``, [E, R, C] bf16, newly allocated."""
        return ops.dequantize(self.quantized, direction, backend=self.backend)

    def memories(self) -> tuple[torch.UntypedStorage, ...]:
        """Return the memory of everything that GEMMs read or a gather writes."""
        tensors = (*self.laid_out.buffers().values(), *self.storage_scales.values())
        return tuple(tensor.untyped_storage() for tensor in tensors)

    def before_gradient(self) -> None:
        """Notify the bucket that a gradient is about to be written into its memory."""
        if self.bucket is not None:
            self.bucket.before_gradient()

    def require_present(self) -> None:
        """Raise StateError if the weight, or memory that it shares, is offloaded."""
        if self.state.weights in OFFLOADED or not has_memory(self.laid_out.rowwise_data):
            raise StateError(
                f"{self.name}: expected the bytes of the weight, got none: they are offloaded. "
                "Call reload_from_cpu() on the buffers of the DDP module first."
            )

    def require_fresh(self) -> None:
        """Raise StateError if the weight is behind its masters, or offloaded."""
        if self.state.weights is not Weights.FRESH:
            self.require_present()
            raise StateError(
                f"{self.name}: expected the weights of the current masters, got those of an "
                "earlier step. Let the parameter gather run before they are read: keep the forward "
                "pre-hooks enabled, or call start_param_sync(force_sync=True) on the DDP module."
            )

    def require_writable(self) -> None:
        """Raise StateError if a gather is running or due, or the weight is offloaded or on meta."""
        self.require_present()
        if self.device.type == "meta":
            raise StateError(
                f"{self.name}: expected memory to write into, got a weight on meta. Call "
                "to_empty(device=...) on its module first."
            )
        if self.bucket is not None and not self.is_fresh:
            raise StateError(
                f"{self.name}: expected weights of the current masters to write into, got those of "
                "an earlier step, which the parameter gather is going to overwrite. Call "
                "start_param_sync(force_sync=True) on the DDP module before values are loaded."
            )


class PortableStorage(WeightStorage):
    """Storage in plain tensors, at their logical shapes, on any device.

    Args:
        format: block-scaled format.
        shape: logical [E, R, C].
        name: parameter name, for errors.
        device: device of the buffers.
        record_amax: whether to keep the amax of every expert at each requantization. Formats with a
            global amax always do.
        backend: backend that quantizes written values.

    Raises:
        LayoutError: ``shape`` does not fit the format.
    """

    _whole: "tuple[PortableStorage, int] | None" = None
    """Storage that this is an expert of, and the expert's index."""

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
        """Return a storage over existing buffers; arguments are those of :class:`WeightStorage`."""
        storage = cls.__new__(cls)
        WeightStorage.__init__(storage, name, quantized, backend)
        return storage

    def bind(self, buffers: Mapping[str, Tensor], bucket: BindingBucket) -> None:
        """Move the bytes of some buffers into memory of a bucket, and alias that memory.

        An expert's storage no longer shares bytes with the whole afterwards. Arguments are those of
        :meth:`WeightStorage.bind`.
        """
        super().bind(buffers, bucket)
        if buffers:
            self._whole = None

    def expert(self, index: int) -> "PortableStorage":
        """Return a storage [1, R, C] over the buffers of expert ``index``, sharing memory."""
        whole, one = self.quantized, slice(index, index + 1)
        buffers = (buffer[one] for buffer in whole.buffers().values())
        view = QuantizedWeight.of_buffers(whole.format, (1, *whole.shape[1:]), buffers)
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
        """Return the storage whose experts are exactly ``parts``, in order, or None."""
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
    """Return one uninitialized storage [E, R, C], or, if ``apart``, one per expert over it."""
    whole = PortableStorage(
        format, shape, name=name, device=device, record_amax=record_amax, backend=backend
    )
    return [whole.expert(index) for index in range(shape[0])] if apart else [whole]
