"""Transformer Engine's quantized weights behind the interface of our own storage.

The only place that reads private fields of its tensor classes (2.20). Data is used where it lies:
a bucket's planes become the weight's own. Scales are kept once a block, as they travel, and spread
into the padded tensors that products read when a gather lands.
"""

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from moe_optim.errors import StateError
from moe_optim.formats import (
    DIRECTIONS,
    FP8_BLOCK,
    MXFP8,
    MXFP8_2D,
    BlockScaledFormat,
    Direction,
    QuantizedWeight,
)
from moe_optim.modules.storage import Plane

_FORMATS: dict[str, tuple[BlockScaledFormat, ...]] = {
    "Float8BlockwiseQTensor": (FP8_BLOCK,),
    "MXFP8Tensor": (MXFP8, MXFP8_2D),  # in 2-D blocks both copies have the same bytes
}


def te_formats_of(param: Tensor) -> tuple[BlockScaledFormat, ...]:
    """Return the formats that a weight of Transformer Engine can hold, none for other tensors.

    Found by the name of its class, so that nothing has to be imported.
    """
    names = {cls.__name__ for cls in type(param).__mro__}
    return next((formats for name, formats in _FORMATS.items() if name in names), ())


class TransformerEngineStorage:
    """One weight [R, C] of Transformer Engine, as a storage of one expert [1, R, C].

    Products read the weight itself, so nobody here can stop a stale read: ``is_fresh`` is a note.

    Args:
        param: rowwise data must be there; columnwise data is allocated if it is not.
        format: one of :func:`te_formats_of`.

    Raises:
        StateError: the weight is stored in a way that is not known here.
    """

    def __init__(self, param: Any, format: BlockScaledFormat) -> None:
        self._param = param
        self.name = f"{type(param).__name__} weight"
        self.format = format
        self.is_fresh = True
        self.is_bound = False
        self.version = 0
        self.recorded_amax: Tensor | None = None
        rows, cols = param.shape
        self.shape = (1, rows, cols)
        self._check_layout()
        self._complete()
        self.quantized = self._view()
        self._pointers = self.pointers()

    @property
    def initial(self) -> Tensor | None:
        """Values before quantization, until masters have been made of them."""
        return getattr(self._param, "_high_precision_init_val", None)

    @property
    def device(self) -> torch.device:
        """Where the planes lie."""
        device: torch.device = self._param._rowwise_data.device
        return device

    @property
    def storage_scales(self) -> Mapping[Direction, Tensor]:
        """Padded scales that products read, [1, ...] each."""
        return {
            "rowwise": self._param._rowwise_scale_inv.unsqueeze(0),
            "columnwise": self._param._columnwise_scale_inv.unsqueeze(0),
        }

    def planes(self) -> Mapping[str, Plane]:
        """Return every distinct tensor of the storage by name."""
        elements = max(1, self.shape[1] * self.shape[2])
        return {
            name: Plane(tensor, Fraction(tensor.numel(), elements))
            for name, tensor in self.quantized.planes().items()
        }

    def pointers(self) -> tuple[int, ...]:
        """Return the address of everything that products read."""
        param = self._param
        tensors = (
            param._rowwise_data,
            param._rowwise_scale_inv,
            param._columnwise_data,
            param._columnwise_scale_inv,
        )
        return tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)

    def has_moved(self) -> bool:
        """Say whether somebody gave the weight other tensors; take them over if that is harmless.

        Raises:
            StateError: data that a bucket gathers into is no longer the weight's.
        """
        if self.pointers() == self._pointers:
            return False
        travels = (
            [0] if self.format.is_2d else [0, 2]
        )  # of pointers: data that is gathered in place
        now = self.pointers()
        if not now[0] or (self.is_bound and any(now[i] != self._pointers[i] for i in travels)):
            raise StateError(
                f"{self.name}: expected the data that its bucket gathers into, got another tensor. "
                "Something replaced the data of the weight; write into it with copy_() instead."
            )
        self._complete()
        self.quantized = replace(
            self.quantized, columnwise_data=self._param._columnwise_data.unsqueeze(0)
        )
        self._pointers = self.pointers()
        return True

    def bind(self, planes: Mapping[str, Tensor]) -> None:
        """Move the bytes of some planes into memory of a bucket, and stay there."""
        for name, plane in planes.items():
            plane.copy_(getattr(self.quantized, name))
        both: dict[str, Any] = dict(planes)
        if self.format.is_2d and "rowwise_scale" in planes:
            both["columnwise_scale"] = planes["rowwise_scale"].transpose(1, 2)
        if self.format.columnwise_copy == "shared" and "rowwise_data" in planes:
            both["columnwise_data"] = planes["rowwise_data"]
        self.quantized = replace(self.quantized, **both)
        self._param._rowwise_data = self.quantized.rowwise_data.squeeze(0)
        self._param._columnwise_data = self.quantized.columnwise_data.squeeze(0)
        self.is_bound = True
        self._pointers = self.pointers()

    def finish_gather(self) -> None:
        """Take note of new bytes."""
        self.version += 1

    def _check_layout(self) -> None:
        param = self._param
        problems = {
            "scales in the order of products (swizzled)": getattr(
                param, "_with_gemm_swizzled_scales", False
            ),
            "scales of rows (1-D blocks)": self.format.is_2d
            and not getattr(param, "_is_2D_scaled", True),
            "no rowwise data": param._rowwise_data is None,
            f"{param.dim()} dimensions": param.dim() != 2,
        }
        found = [what for what, is_so in problems.items() if is_so]
        if found:
            raise StateError(
                f"{self.name} {list(param.shape)}: expected data and plain scales of both "
                f"directions, got {', '.join(found)}. Build the model with the recipe's defaults."
            )

    def _complete(self) -> None:
        """Have what products will want and Transformer Engine makes on demand, once each."""
        param, shape = self._param, self.shape
        if self.format.columnwise_copy == "shared":
            param._columnwise_data = param._rowwise_data
        elif param._columnwise_data is None:
            size = self.format.data_shape(shape, "columnwise")[1:]
            param._columnwise_data = param._rowwise_data.new_zeros(size)
        for direction in DIRECTIONS:
            if getattr(param, f"_{direction}_scale_inv") is None:
                size = self.format.storage_scale_shape(shape[1], shape[2], direction)
                scale = torch.zeros(size, dtype=self.format.scale_dtype, device=self.device)
                setattr(param, f"_{direction}_scale_inv", scale)

    def _view(self) -> QuantizedWeight:
        """Return the planes: data as it lies there, and the scales without their padding."""
        param, format = self._param, self.format
        scales: dict[Direction, Tensor] = {}
        for direction in DIRECTIONS:
            _, down, across = format.scale_shape(self.shape, direction)
            stored = getattr(param, f"_{direction}_scale_inv")
            if direction == "columnwise" and format.is_2d:
                scales[direction] = scales["rowwise"].transpose(1, 2)
            else:
                scales[direction] = stored[:down, :across].clone().unsqueeze(0)
        return QuantizedWeight(
            format=format,
            shape=self.shape,
            rowwise_data=param._rowwise_data.unsqueeze(0),
            rowwise_scale=scales["rowwise"],
            columnwise_data=param._columnwise_data.unsqueeze(0),
            columnwise_scale=scales["columnwise"],
        )
