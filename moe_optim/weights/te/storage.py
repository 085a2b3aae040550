"""Storage of Transformer Engine's quantized weights.

Data is used in place: the weight's data fields alias the bucket's buffers. Scales are kept one per
block, as gathered, and expanded into the padded tensors that GEMMs read when a gather finishes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_optim.errors import ConfigError, StateError
from moe_optim.formats import DIRECTIONS, BlockScaledFormat, Direction, QuantizedWeight
from moe_optim.formats.reference import expand_scale_into
from moe_optim.kernels.member_table import Backend
from moe_optim.places import Attributes
from moe_optim.weights.storage import BindingBucket, PortableStorage, WeightStorage
from moe_optim.weights.te.fields import (
    GROUPED,
    ONE,
    SWIZZLED,
    is_grouped,
    names_of,
    read_values,
    refuse_foreign_bytes,
    used_scales,
)
from moe_optim.weights.te.recipe import import_error, make_quantizer


class TransformerEngineStorage(WeightStorage):
    """One weight of Transformer Engine: [R, C] as a storage [1, R, C], or a group [E, R, C].

    Modules of Transformer Engine read their weights directly, so stale reads there are not
    detected. Rowwise data must exist; other missing tensors are allocated. Recorded amaxes are NaN
    until the first requantization. Raises StateError for an unsupported layout.
    """

    def __init__(
        self,
        param: Any,
        format: BlockScaledFormat,
        name: str | None = None,
        *,
        record_amax: bool = False,
        backend: Backend = "auto",
    ) -> None:
        self._param = param
        self._fields = GROUPED if is_grouped(param) else ONE
        self.name, self.format = name or f"{type(param).__name__} weight", format
        self._gathered: frozenset[str] = frozenset()
        shape = tuple(param.shape)
        self._check_layout(shape)
        self.shape = (1, *shape) if len(shape) == 2 else shape
        self._complete()
        super().__init__(self.name, self._view(), backend)
        if record_amax and not format.has_global_amax:
            self.recorded_amax = torch.full(
                self.shape[:1], torch.nan, dtype=torch.float32, device=self.device
            )
        self._take_note_of_fields()

    @property
    def _initial(self) -> Tensor | None:
        return getattr(self._param, "_high_precision_init_val", None)

    @_initial.setter
    def _initial(self, values: Tensor | None) -> None:
        if values is not None:
            self._param._high_precision_init_val = values
        elif self._initial is not None:
            del self._param._high_precision_init_val

    def renew_initial(self) -> bool:
        """Set ``initial`` to the dequantized bytes if they were not quantized from it.

        Judged by error: the bytes must be about as close to ``initial`` as its requantization.
        Returns whether ``initial`` was replaced.
        """
        if self.initial is None:
            return False
        initial = self.initial.view(self.shape)
        own = read_values(self._param).view(self.shape)  # as written by the loader
        fresh = PortableStorage(
            self.format, (1, *self.shape[1:]), device=self.device, backend=self.backend
        )
        for given, held in zip(initial, own, strict=True):
            on_device = given.to(self.device)
            fresh.write(on_device.unsqueeze(0))
            least, error = (
                (values.double() - on_device.double()).norm()
                for values in (fresh.dequantize()[0], held)
            )
            if not error <= 1.1 * least:  # quantizers differ by less; NaN also fails
                self.initial = own.view(self.initial.shape).to(self.initial.device)
                return True
        return False

    @property
    def storage_scales(self) -> Mapping[Direction, Tensor]:
        """Padded scales that GEMMs read, [E, ...] each."""
        return {direction: self._get(f"{direction}_scale") for direction in DIRECTIONS}

    @property
    def have_moved(self) -> bool:
        """Whether a group has new tensors or members, or swizzled scales."""
        return bool(self._swizzled()) or self._pointers() != self._known_pointers

    def _pointers(self) -> list[int]:
        owners = [(self._fields, self._param), *((ONE, member) for member in self._members())]
        names = names_of(self.format)
        tensors = [getattr(owner, fields[name]) for fields, owner in owners for name in names]
        return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]

    def take_over(self) -> None:
        """Adopt tensors that other code assigned to the weight, and reset scales to plain order.

        Swizzled scales can be discarded, because the bytes are overwritten next.
        """
        held = self.quantized
        for one in self._swizzled():
            setattr(one, SWIZZLED, False)
        for name in ("rowwise_data", "columnwise_data"):
            data = getattr(self._param, self._fields[name])
            if name not in self._gathered and (data is not None or name == "columnwise_data"):
                continue
            if data is None or data.data_ptr() != getattr(held, name).data_ptr():
                raise StateError(
                    f"{self.name}: expected the data that its bucket gathers into, got another "
                    "tensor. Something replaced the data of the weight; write into it with copy_() "
                    "instead."
                )
        self._complete()
        self.laid_out = replace(
            held,
            rowwise_data=self._get("rowwise_data"),
            columnwise_data=self._get("columnwise_data"),
        )
        self._point_at_buffers()

    def read_anew(self) -> None:
        """Copy the scales of a weight without a bucket again, which no gather will write."""
        if self.bucket is None and not self._swizzled():
            self.laid_out = self._view()
            self._take_note_of_fields()

    def bind(self, buffers: Mapping[str, Tensor], bucket: BindingBucket) -> None:
        """Move the bytes of some buffers into memory of a bucket; the weight gets views of it."""
        super().bind(buffers, bucket)
        if self.format.is_2d and "rowwise_scale" in buffers:
            columnwise_scale = buffers["rowwise_scale"].transpose(1, 2)
            self.laid_out = replace(self.laid_out, columnwise_scale=columnwise_scale)
        self._point_at_buffers()
        self._gathered = frozenset(buffers)

    def note_write(self) -> None:
        """Expand the scales into their padded form, and record the write."""
        for direction, stored in self.storage_scales.items():
            expand_scale_into(self.quantized, direction, stored)
        super().note_write()

    def whole_of(self, parts: Any) -> "TransformerEngineStorage | None":
        """Return this storage if ``parts`` is only this one; separate experts have no whole."""
        return self if len(parts) == 1 else None

    def __deepcopy__(self, memo: dict[int, Any]) -> PortableStorage | None:
        """Copy the bytes into a portable storage.

        Returns None when Transformer Engine's weight is copied with its attributes: the copy has
        its own bytes and creates its own storage on demand.
        """
        if getattr(self._param, "quantized_storage", None) is self:
            return None
        memo[id(self)] = copy = self.clone()
        return copy

    def _swizzled(self) -> list[Any]:
        owners = [self._param, *self._members()]
        return [one for one in owners if getattr(one, SWIZZLED, False)]

    def _members(self) -> list[Any]:
        return getattr(self._param, "quantized_tensors", None) or []

    def _shape_of(self, name: str) -> tuple[int, ...]:
        direction: Direction = "rowwise" if name.startswith("rowwise") else "columnwise"
        experts, rows, cols = self.shape
        if name.endswith("amax"):
            return (experts,)
        if name.endswith("data"):
            return self.format.data_shape(self.shape, direction)
        return (experts, *self.format.storage_scale_shape(rows, cols, direction))

    def _get(self, name: str) -> Tensor:
        tensor: Tensor = getattr(self._param, self._fields[name])
        return tensor.view(self._shape_of(name))

    def _set(self, name: str, tensor: Any) -> None:
        """Assign a tensor [E, ...] to the weight and to the members of a group."""
        if self._fields is GROUPED:
            setattr(self._param, GROUPED[name], tensor.reshape(-1))
        else:
            setattr(self._param, ONE[name], _expert(tensor, 0))
        for index, member in enumerate(self._members()):
            setattr(member, ONE[name], _expert(tensor, index))

    def _point_at_buffers(self) -> None:
        held = self.laid_out
        for name in names_of(self.format):
            if name.endswith("scale"):
                self._set(name, self._get(name))
            else:  # one amax for both directions
                self._set(name, held.global_amax if "amax" in name else getattr(held, name))
        self._take_note_of_fields()

    def _take_note_of_fields(self) -> None:
        """Record all addresses, and link group members to this storage for freshness checks."""
        if self._fields is ONE:
            flags = (SWIZZLED,) if hasattr(self._param, SWIZZLED) else ()
            names = [ONE[name] for name in names_of(self.format)]
            self.watched = (Attributes.of([self._param], names, flags),)
        else:
            self._known_pointers = self._pointers()
            self.watched = (self,)
        for member in self._members():
            member.group_storage = self

    def _check_layout(self, shape: tuple[int, ...]) -> None:
        param, format = self._param, self.format
        refuse_foreign_bytes(param, [format], self.name)
        dimensions = 3 if self._fields is GROUPED else 2
        problems = {
            "scales in GEMM order (swizzled)": getattr(param, SWIZZLED, False),
            "no rowwise data": getattr(param, self._fields["rowwise_data"]) is None,
            f"{len(shape)} dimensions": len(shape) != dimensions,
        }
        found = [what for what, is_so in problems.items() if is_so]
        if found:
            raise StateError(
                f"{self.name} {list(shape)}: expected {format.name} data and plain scales, got "
                f"{', '.join(found)}. Build the model with moe_optim installed and the defaults of "
                "Transformer Engine's recipe."
            )

    def _complete(self) -> None:
        """Allocate the tensors that Transformer Engine creates on demand, and zero the padding."""
        device = getattr(self._param, self._fields["rowwise_data"]).device
        for name in names_of(self.format):
            if name == "columnwise_data" and self.format.columnwise_copy == "shared":
                self._set(name, self._get("rowwise_data"))
            elif getattr(self._param, self._fields[name]) is None:
                kind = name.rpartition("_")[2]
                dtypes = {"scale": self.format.scale_dtype, "amax": torch.float32}
                dtype = dtypes.get(kind, torch.uint8)
                self._set(name, torch.zeros(self._shape_of(name), dtype=dtype, device=device))
        for direction, stored in self.storage_scales.items():
            used = used_scales(stored, self.format, self.shape, direction)
            repeat_down, repeat_across = self.format.storage_scale_repeat(direction)
            stored[:, used.shape[1] * repeat_down :].zero_()
            stored[:, :, used.shape[2] * repeat_across :].zero_()

    def _view(self) -> QuantizedWeight:
        """Return the buffers: data in place, and scales without padding and repeats."""
        scales: dict[str, Tensor] = {}
        for direction in DIRECTIONS:
            if direction == "columnwise" and self.format.is_2d:
                scales["columnwise_scale"] = scales["rowwise_scale"].transpose(1, 2)
                continue
            used = used_scales(self.storage_scales[direction], self.format, self.shape, direction)
            scales[f"{direction}_scale"] = used.clone(memory_format=torch.contiguous_format)
        amax = self._get("rowwise_amax").clone() if self.format.has_global_amax else None
        if amax is not None:
            self._set("rowwise_amax", amax)
            self._set("columnwise_amax", amax)
        return QuantizedWeight(
            format=self.format,
            shape=self.shape,
            rowwise_data=self._get("rowwise_data"),
            columnwise_data=self._get("columnwise_data"),
            global_amax=amax,
            **scales,
        )


def _expert(tensor: Tensor, index: int) -> Tensor:
    """Return one expert's tensor; an amax keeps shape [1]."""
    return tensor[index : index + 1] if tensor.dim() == 1 else tensor[index]


def make_te_storages(
    format: BlockScaledFormat,
    shape: tuple[int, int, int],
    *,
    apart: bool,
    name: str,
    device: torch.device | str | None,
    record_amax: bool,
    backend: Backend,
) -> Sequence[WeightStorage]:
    """Return storages of portable experts, in a ``GroupedTensor`` or one tensor per expert.

    Launches no Transformer Engine kernel, so its classes can hold formats that its kernels do not
    support on this device.
    """
    experts, rows, cols = format.check_shape(shape, name)
    if why := import_error():
        raise ConfigError(
            f"moe_optim: storage: expected Transformer Engine for transformer_engine, got {why}. "
            "Install it, or set storage: portable."
        )
    from transformer_engine.pytorch.tensor.grouped_tensor import GroupedTensor

    quantizer, like = make_quantizer(format), {"dtype": torch.bfloat16, "device": device}
    if apart:
        weights = {
            f"{name}{index}": quantizer.make_empty((rows, cols), **like) for index in range(experts)
        }
    else:
        shapes = [(rows, cols)] * experts
        weights = {
            name: GroupedTensor.make_grouped_tensor_with_shapes(
                num_tensors=experts, shapes=shapes, quantizer=quantizer, **like
            )
        }
    return [
        TransformerEngineStorage(weight, format, called, record_amax=record_amax, backend=backend)
        for called, weight in weights.items()
    ]
