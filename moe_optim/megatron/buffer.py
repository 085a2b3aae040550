"""Parameter and gradient buffers that hold quantized expert weights."""

import copy
import re
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import param_and_grad_buffer as upstream
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucket, _ParamAndGradBuffer
from megatron.core.transformer.cuda_graphs import is_graph_capturing
from torch import Tensor

from moe_optim.errors import ConfigError, StateError
from moe_optim.layout.shards import Member
from moe_optim.layout.wire import Slot
from moe_optim.megatron.bucket_storage import BucketStorage, Content, Event
from moe_optim.megatron.gather import Bf16Gather, QuantizedGather
from moe_optim.megatron.managed import is_managed, storage_of
from moe_optim.megatron.plane_offload import HostPlanes
from moe_optim.megatron.plugin import config_in_force

_stock_param_uses_quantized_storage = upstream._param_uses_quantized_storage
_stock_is_grouped_mxfp8tensor = upstream.is_grouped_mxfp8tensor


def _param_uses_quantized_storage(param: torch.nn.Parameter) -> bool:
    """Return whether Megatron must give ``param`` a buffer of its own kind (uint8)."""
    return is_managed(param) or _stock_param_uses_quantized_storage(param)


def is_grouped_mxfp8tensor(tensor: Tensor) -> bool:
    """Return whether the buffer shares memory between ``tensor``'s gradients and its gather."""
    return is_managed(tensor) or _stock_is_grouped_mxfp8tensor(tensor)


class GroupedParamAndGradBuffer(_ParamAndGradBuffer):
    """Megatron's buffer, where a buffer of quantized weights is *managed*.

    A managed buffer has no ``param_data``. Every bucket knows what its gradient memory holds
    (``bucket.storage``) and how its weights are gathered (``bucket.gather``). Buffers of all other
    parameters are Megatron's to the byte.
    """

    def __init__(
        self,
        ddp_config: Any,
        param_dtype: torch.dtype,
        grad_dtype: torch.dtype,
        params_with_names: list[tuple[torch.nn.Parameter, str]],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Lay out the buffer; arguments are Megatron's."""
        kinds = {is_managed(param) for param, _ in params_with_names}
        self.managed = kinds == {True}
        if len(kinds) > 1:
            names = ", ".join(name for param, name in params_with_names)
            raise StateError(
                f"parameter buffer: expected quantized weights of one kind, got portable and "
                f"other ones together: {names}. Use one expert implementation in a model."
            )
        if self.managed and not ddp_config.use_distributed_optimizer:
            raise ConfigError(
                f"moe_optim: expected --use-distributed-optimizer, since {params_with_names[0][1]} "
                "is quantized, got a model that is wrapped without it. Give the flag, or set "
                "format: bf16."
            )
        if not self.managed:
            super().__init__(
                ddp_config, param_dtype, grad_dtype, params_with_names, *args, **kwargs
            )
            return
        for param, name in params_with_names:
            storage_of(param).name = name
        # Tells Megatron's constructor to leave the storage of the weights alone. A copy: nothing
        # else may see the flag, and its own check wants Transformer Engine.
        sharing_config = copy.copy(ddp_config)
        sharing_config.reuse_grad_buf_for_mxfp8_param_ag = True
        super().__init__(
            sharing_config, param_dtype, grad_dtype, params_with_names, *args, **kwargs
        )
        self.ddp_config = ddp_config
        self.param_data = None
        self._on_host: HostPlanes | None = None
        for param in self.params:
            storage = self.param_to_bucket[param].storage
            param.register_hook(partial(_note_gradient, storage))

    @property
    def has_nvfp4_params(self) -> bool:
        """Whether Megatron is to pack NVFP4 bytes; those of managed weights are planes already."""
        return self._has_nvfp4_params and not self.managed

    @has_nvfp4_params.setter
    def has_nvfp4_params(self, found: bool) -> None:
        self._has_nvfp4_params = found

    def _new_bucket(self, *args: Any, **kwargs: Any) -> _ParamAndGradBucket:
        """Create a bucket; a managed one gathers by itself, as the wire in force says."""
        bucket = super()._new_bucket(*args, **kwargs)
        if self.managed:
            names = [param.quantized_storage.name for param in bucket.params_list]
            where = names[0] if len(names) == 1 else f"{names[-1]} to {names[0]}"
            bucket.storage = BucketStorage(f"bucket {bucket.bucket_id} ({where})", bucket.grad_data)
            bucket.param_data = bucket.grad_data[:0]  # Megatron takes a view, and leaves it
            bucket.members = list_members(bucket)
            bucket.finish_gather = lambda: None  # until a bucket group owns it
            wire = QuantizedGather if config_in_force().wire == "quantized" else Bf16Gather
            bucket.gather = wire(bucket, list_slots(bucket), dp_size=self.data_parallel_world_size)
        return bucket

    def reset(self) -> None:
        """Zero the gradients."""
        if not self.managed:
            super().reset()
            return
        for bucket in self.buckets:
            bucket.storage.zero()
        for grad in self.extra_main_grads:
            grad.zero_()

    def offload_to_cpu(self, move_params: bool = True, move_grads: bool = True) -> None:
        """Free gradient memory, and move weights to the host; a gather in either is finished first.

        Reading, writing or gathering managed weights raises until they are back.
        """
        if self.managed:
            for bucket in self.buckets:
                (bucket.finish_gather if move_params else bucket.storage.before_zero)()
            if move_params and self._on_host is None:
                self._on_host = HostPlanes(param.quantized_storage for param in self.params)
        super().offload_to_cpu(move_params, move_grads)

    def reload_from_cpu(self, move_params: bool = True, move_grads: bool = True) -> None:
        """Take the memory of weights and gradients again, these zeroed."""
        was_offloaded = self.grad_data_size > 0
        super().reload_from_cpu(move_params, move_grads)
        if move_params and self.managed and self._on_host is not None:
            self._on_host.restore()
            self._on_host = None
            for bucket in self.buckets:
                bucket.gather.forget()  # it knows addresses
        if self.managed and move_grads and was_offloaded:
            for bucket in self.buckets:
                bucket.storage.content = Content.ZERO
                if bucket.gather.uses_gradient_memory:
                    bucket.gather.forget()  # the memory may have come back elsewhere


def list_slots(bucket: _ParamAndGradBucket) -> tuple[Slot, ...]:
    """Return every parameter of a bucket, in the order of ``bucket.params_list``."""
    return tuple(
        Slot(
            name=param.quantized_storage.name,
            start=bucket.param_to_index[param][0],
            shape=param.quantized_storage.shape,
        )
        for param in bucket.params_list
    )


def list_members(bucket: _ParamAndGradBucket) -> tuple[Member, ...]:
    """Return every expert of a bucket, with its place in it."""
    members = []
    for param in bucket.params_list:
        storage = param.quantized_storage
        start, _ = bucket.param_to_index[param]
        layer = re.search(r"\.layers\.(\d+)\.", storage.name)
        experts, rows, cols = storage.shape
        members += [
            Member(
                parameter=storage.name,
                layer=int(layer[1]) if layer else -1,
                expert=getattr(param, "first_expert", 0) + index,
                rows=rows,
                cols=cols,
                format=storage.format.name,
                bucket=bucket.bucket_id,
                start=start + index * rows * cols,
            )
            for index in range(experts)
        ]
    return tuple(members)


def _note_gradient(storage: BucketStorage, _grad: Tensor) -> None:
    if is_graph_capturing() and storage.content is not Content.ZERO:
        return  # Megatron zeroes, or puts back, what a capture leaves in gradient memory
    if storage.content is not Content.PARTIAL:  # called once a weight and micro-batch
        storage.record(Event.ACCUMULATE)
