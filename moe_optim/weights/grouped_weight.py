"""Quantized expert weights that torch and Megatron handle as one bf16 parameter."""

import copy
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from moe_optim.errors import StateError
from moe_optim.formats import QuantizedWeight, get_format
from moe_optim.weights.storage import WeightStorage
from moe_optim.weights.traced import TracedStorage, handle_of

aten = torch.ops.aten


class GroupedWeight(Tensor):
    """Parameter of logical shape [E, R, C] (or [R, C]) and dtype bf16 over quantized storage.

    Shape, dtype, ``numel`` and gradient are those of the logical bf16 weight; the parameter itself
    has no memory. Torch functions read the dequantized rowwise copy, and ``copy_`` quantizes its
    source. Both raise while the weight is behind its masters: reads would be stale, and the next
    gather would overwrite writes. All other in-place writes raise, and so do views, through which
    writes would be lost. ``detach``, ``data``, ``alias``, and ``expand`` to the same shape share
    the storage; ``deepcopy`` and ``to(device)`` copy it; pickling stores bf16 values, so files load
    without this package.

    Args:
        storage: quantized storage of the weight.
        shape: ``storage.shape``, or [R, C] for a storage of one expert.
    """

    quantized_storage: WeightStorage
    """Storage of the quantized bytes."""
    # Attributes of compiled graphs, resolved at every run
    _buffer_rowwise_data = property(attrgetter("quantized_storage.laid_out.rowwise_data"))
    _buffer_rowwise_scale = property(attrgetter("quantized_storage.laid_out.rowwise_scale"))
    _buffer_columnwise_data = property(attrgetter("quantized_storage.laid_out.columnwise_data"))
    _buffer_columnwise_scale = property(attrgetter("quantized_storage.laid_out.columnwise_scale"))
    _buffer_global_amax = property(attrgetter("quantized_storage.laid_out.global_amax"))

    @property
    def storage_handle(self) -> Tensor:
        """Handle of the storage in compiled graphs, see ``weights.traced.handle_of``."""
        storage = self.quantized_storage
        return storage.handle if isinstance(storage, TracedStorage) else handle_of(storage)

    @staticmethod
    def __new__(
        cls: type["GroupedWeight"],
        storage: WeightStorage,
        shape: torch.Size | tuple[int, ...] | None = None,
        requires_grad: bool = False,
    ) -> "GroupedWeight":
        """Wrap ``storage`` without copying."""
        weight: GroupedWeight = Tensor._make_wrapper_subclass(
            cls,
            torch.Size(storage.shape if shape is None else shape),
            dtype=torch.bfloat16,
            device=storage.device,
            requires_grad=requires_grad,
        )
        weight.quantized_storage = storage
        return weight

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Handle the operations that keep the storage; dequantize for all others."""
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        if handler is not None:
            result = handler(func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        _refuse_writes(func, args, kwargs)
        _refuse_views(func, args)
        args, kwargs = pytree.tree_map_only(GroupedWeight, GroupedWeight.dequantize, (args, kwargs))
        return func(*args, **kwargs)

    def __tensor_flatten__(self) -> tuple[list[str], tuple[str, tuple[int, int, int]]]:
        """Return buffers and handle, to replace the weight in compiled graphs, and metadata."""
        storage = self.quantized_storage
        buffers = [f"_buffer_{name}" for name in storage.format.buffer_names]
        return [*buffers, "storage_handle"], (storage.format.name, storage.shape)

    @staticmethod
    def __tensor_unflatten__(
        tensors: dict[str, Tensor],
        meaning: tuple[str, tuple[int, int, int]],
        outer_size: Sequence[int],
        outer_stride: Sequence[int],  # noqa: ARG004  # nominal: the weight has no memory
    ) -> "GroupedWeight":
        """Return a traced weight for the graph that is being compiled."""
        name, shape = meaning
        format = get_format(name)
        *buffers, handle = tensors.values()
        quantized = QuantizedWeight.of_buffers(format, shape, buffers)
        return GroupedWeight(TracedStorage(quantized, handle), torch.Size(outer_size))

    def dequantize(self) -> Tensor:
        """Return the rowwise values as plain bf16, in the logical shape; StateError if stale."""
        self.quantized_storage.require_fresh()
        return self.quantized_storage.dequantize("rowwise").view(self.shape)

    def alias(self) -> "GroupedWeight":
        """Return another tensor over the same storage, without gradient history."""
        return GroupedWeight(self.quantized_storage, self.shape)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Device of the storage, which ``data`` replaces."""
        return self.quantized_storage.device

    @property
    def data(self) -> "GroupedWeight":
        """Weight without gradient history, sharing the storage."""
        return self.alias()

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, GroupedWeight):
            raise StateError(
                f"{self.quantized_storage.name}: quantized storage cannot be replaced by a plain "
                f"tensor of {value.dtype}. If Megatron's DDP did this, the model was wrapped "
                "before moe_optim.install(): call install() first."
            )
        own, other = self.quantized_storage, value.quantized_storage
        if value.shape != self.shape:
            raise StateError(
                f"{own.name}: data: expected a weight of {list(self.shape)}, got one of "
                f"{list(value.shape)}. Build a parameter of that shape instead."
            )
        if own.bucket is not None and other is not own:
            raise StateError(
                f"{own.name}: data: expected the storage that its bucket gathers into, got that of "
                f"{other.name}. Write the values with copy_(), or exchange weights before the "
                "model is wrapped with DDP."
            )
        self.quantized_storage = other

    def get_high_precision_init_val(self) -> Tensor:
        """Return the values last written before masters were created, else dequantized values.

        Masters start from these to avoid quantization error. Shape is logical; dequantized values
        are bf16, written values keep their dtype and are not a copy. The distributed optimizer
        calls this method by Transformer Engine's name.
        """
        initial = self.quantized_storage.initial
        return self.dequantize() if initial is None else initial.view(self.shape)

    def clear_high_precision_init_val(self) -> None:
        """Free the initial values kept for the masters."""
        self.quantized_storage.initial = None

    def __copy__(self) -> Tensor:
        """Return another weight over the same storage, with the same attributes."""
        result = self._over(self.quantized_storage)
        vars(result).update(vars(self))
        return result

    def _over(self, storage: WeightStorage) -> Tensor:
        """Wrap another storage, as a parameter if this is one."""
        weight = GroupedWeight(storage, self.shape)
        return torch.nn.Parameter(weight, self.requires_grad) if _is_parameter(self) else weight

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Copy the storage and the attributes; the copy is a parameter if this one is.

        Tensor attributes such as ``main_grad`` belong to an optimizer or a wrapper and are not
        copied; the copy accumulates into ``grad``.
        """
        result = self._over(copy.deepcopy(self.quantized_storage, memo))
        memo[id(self)] = result
        for name, value in vars(self).items():
            describes = not isinstance(value, Tensor) and name != "grad_added_to_main_grad"
            if describes and name not in ("quantized_storage", "_is_param"):
                setattr(result, name, copy.deepcopy(value, memo))
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the bf16 values as a plain tensor, or as a parameter if this is one."""
        if isinstance(self.quantized_storage, TracedStorage):  # part of the compiler's cache key
            names, meaning = self.__tensor_flatten__()
            tensors = {name: getattr(self, name) for name in names}
            return self.__tensor_unflatten__, (tensors, meaning, tuple(self.shape), ())
        values = self.dequantize()
        if _is_parameter(self):
            values = torch.nn.Parameter(values, self.requires_grad)
        return values.__reduce_ex__(protocol)

    def share_memory_(self) -> "GroupedWeight":
        """Raise StateError: quantized weights cannot be shared between processes."""
        raise StateError(
            f"{self.quantized_storage.name}: quantized weights are not shared between processes. "
            "Send their bf16 values, dequantize(), instead."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Describe the weight without dequantizing it."""
        storage = self.quantized_storage
        return f"GroupedWeight({storage.name}, {list(self.shape)}, {storage.format.name})"


class GradientNote:
    """Gradient hook that notifies the bucket of a weight; it does not change the gradient."""

    def __init__(self, weight: Any) -> None:
        self._weight = weight

    def __call__(self, _: Tensor) -> None:
        """Notify the bucket, unless a grouped linear did so before writing the gradient."""
        weight = self._weight
        if isinstance(weight, GroupedWeight) and getattr(weight, "grad_added_to_main_grad", False):
            return
        weight.quantized_storage.before_gradient()


def _is_parameter(weight: Tensor) -> bool:
    return isinstance(weight, torch.nn.Parameter)


def _alias(_func: Any, weight: GroupedWeight) -> GroupedWeight:
    return weight.alias()


def _expand(_func: Any, weight: GroupedWeight, size: list[int], **_: Any) -> Any:
    return weight.alias() if list(size) == list(weight.shape) else NotImplemented


def _copy(_func: Any, target: Tensor, source: Tensor, non_blocking: bool = False) -> Any:
    if not isinstance(target, GroupedWeight):
        return NotImplemented
    storage = target.quantized_storage
    storage.require_writable()
    if isinstance(source, GroupedWeight):
        theirs = source.quantized_storage
        theirs.require_fresh()
        if storage.initial is not None:
            storage.initial = source.get_high_precision_init_val()
        if (theirs.format, theirs.shape) == (storage.format, storage.shape):
            storage.copy_bytes_from(theirs)
            return target
        source = source.dequantize()
    elif storage.initial is not None:  # masters will be created from these values
        like = storage.initial  # fp32 if loaded so
        kept = torch.empty(target.shape, dtype=like.dtype, device=like.device)
        storage.initial = kept.copy_(source.detach())
    storage.write(source.expand(target.shape).reshape(storage.shape).to(torch.bfloat16))
    return target


def _to_copy(_func: Any, weight: GroupedWeight, **kwargs: Any) -> Any:
    if kwargs.get("dtype") not in (None, torch.bfloat16):
        return NotImplemented
    device = kwargs.get("device")
    storage = weight.quantized_storage.clone(None if device is None else torch.device(device))
    return GroupedWeight(storage, weight.shape)


def _broadcast(func: Any, tensors: list[Tensor], *args: Any) -> Any:
    """Broadcast the buffers, and initial values if present, instead of dequantized values."""
    if not isinstance(tensors[0], GroupedWeight):
        return NotImplemented
    storage = tensors[0].quantized_storage
    if _is_parameter(tensors[0]):  # as launchers send weights to ranks that receive bf16
        raise StateError(
            f"{storage.name}: broadcast: expected `.data` of a parameter, which every rank has in "
            "the same format, got the parameter. Send its values, dequantize(), to other tensors."
        )
    storage.require_writable()

    def start(tensor: Tensor) -> Any:
        return func([tensor.view(torch.uint8) if tensor.dim() else tensor], *args)[1]

    def send(tensor: Tensor) -> None:
        if (work := start(tensor)) is not None:  # NCCL returns none unless async_op is set
            work.wait()

    _share_initial(storage, send)
    # NCCL requires contiguous tensors; the others are transposed views of these
    buffers = [buffer for buffer in storage.quantized.buffers().values() if buffer.is_contiguous()]
    *others, last = [one for one in (storage.recorded_amax, *buffers) if one is not None]
    for tensor in others:
        send(tensor)
    work = start(last)
    if storage.storage_scales and work is not None:
        work.wait()  # expanded below from the received buffers
    storage.note_write()
    return tensors, work


def _share_initial(storage: WeightStorage, send: Callable[[Tensor], None]) -> None:
    """Set the initial values of every rank to the sender's, which alone may have loaded any."""
    held, dtypes = storage.initial, (None, torch.bfloat16, torch.float32)
    own = None if held is None else held.dtype if held.dtype in dtypes else torch.float32
    index = torch.tensor(dtypes.index(own), dtype=torch.int64, device=storage.device)
    send(index)
    dtype = dtypes[int(index)]
    if dtype is None:
        storage.initial = None
        return
    if held is None:
        held = torch.empty(storage.shape, dtype=dtype, device=storage.device)
    storage.initial = held.to(storage.device, dtype).contiguous()  # may be on the host
    send(storage.initial)


_HANDLERS: dict[Any, Any] = {
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten.expand.default: _expand,
    aten.copy_.default: _copy,
    aten._to_copy.default: _to_copy,
    torch.ops.c10d.broadcast_.default: _broadcast,
}


def _refuse_views(func: Any, args: tuple[Any, ...]) -> None:
    """Raise if the result would be a writable view of a dequantized copy."""
    if func is aten.expand.default:
        return
    for result in func._schema.returns:
        if result.alias_info is None or result.alias_info.is_write:
            continue
        for weight in args:
            if isinstance(weight, GroupedWeight):
                raise StateError(
                    f"{weight.quantized_storage.name}: {func} would give a view of a dequantized "
                    "copy. Call dequantize() or float() first, and take the view of that; to save "
                    "the weight, call moe_optim.install() before, and pass the parameter itself."
                )


def _refuse_writes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    is_collective = func.namespace == "c10d"  # whose schemas name no alias
    for position, argument in enumerate(func._schema.arguments):
        is_write = argument.alias_info is not None and argument.alias_info.is_write
        if is_collective:
            is_write = position == 0 and func._schema.name.endswith("_")
        if not is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        for weight in pytree.tree_leaves(value):
            if isinstance(weight, GroupedWeight):
                raise StateError(
                    f"{weight.quantized_storage.name}: {func} would write into a dequantized copy "
                    "and be lost. Change the master weight; or use copy_() with the new values, "
                    "and then, in training, optimizer.reload_model_params()."
                )
