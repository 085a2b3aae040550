"""Parameter and gradient buffers that hold quantized expert weights, and their layout."""

import copy
from dataclasses import replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucket, _ParamAndGradBuffer
from megatron.core.optimizer import param_layout
from megatron.core.optimizer.param_layout import PerBufferParamLayout
from torch import Tensor

from moe_optim.buckets.layout import Slot, aligned_end
from moe_optim.buckets.managed_bucket import ManagedBucket, require_gradient_memory
from moe_optim.buckets.matrix_buffers import holds_matrices, matrix_param_layout
from moe_optim.buckets.offload import ParamData
from moe_optim.buckets.states import Event
from moe_optim.errors import ConfigError, StateError
from moe_optim.integration.engine import original
from moe_optim.integration.installation import config_or_bf16, installed_optimizer
from moe_optim.weights.grouped_weight import GradientNote, GroupedWeight
from moe_optim.weights.managed import is_managed, storage_of

_BUFFER = "megatron.core.distributed.param_and_grad_buffer"
_DDP_CONFIG = (
    "megatron.core.distributed.distributed_data_parallel_config:"
    "DistributedDataParallelConfig.__post_init__"
)
_LAYOUT = (
    "megatron.core.optimizer.distrib_optimizer:"
    "DistributedOptimizer._compute_per_buffer_param_layout"
)


def _param_uses_quantized_storage(param: torch.nn.Parameter) -> bool:
    """Return whether ``param`` needs Megatron's uint8 buffer."""
    return is_managed(param) or original(f"{_BUFFER}:_param_uses_quantized_storage")(param)


def is_grouped_mxfp8tensor(tensor: Tensor) -> bool:
    """Return whether gradients of ``tensor`` and its gather share memory."""
    return is_managed(tensor) or original(f"{_BUFFER}:is_grouped_mxfp8tensor")(tensor)


def check_ddp_config(self: Any) -> None:
    """Check a DDP configuration as Megatron does, but accept ``reuse_grad_buf_for_mxfp8_param_ag``.

    The flag requests gathers without extra memory, which holds for every gather of quantized
    weights here.
    """
    asked, self.reuse_grad_buf_for_mxfp8_param_ag = self.reuse_grad_buf_for_mxfp8_param_ag, False
    try:
        original(_DDP_CONFIG)(self)
    finally:
        self.reuse_grad_buf_for_mxfp8_param_ag = asked


class AlignedDistributedOptimizer:
    """Namespace of the static method that replaces Megatron's."""

    @staticmethod
    def _compute_per_buffer_param_layout(
        params: list[torch.nn.Parameter],
        bucket_size: int | None,
        data_parallel_world_size: int,
        ddp_config: Any,
        param_indices: list[int] | None = None,
    ) -> PerBufferParamLayout:
        """Lay out one buffer: whole matrices for Muon, else :func:`align_buckets` if managed."""
        divisor = param_layout.bucket_end_divisor(
            data_parallel_world_size, ddp_config.pad_buckets_for_high_nccl_busbw
        )
        if holds_matrices(params):
            return matrix_param_layout(
                params, bucket_size, data_parallel_world_size, divisor, param_indices
            )
        layout = original(_LAYOUT)(
            params, bucket_size, data_parallel_world_size, ddp_config, param_indices
        )
        managed = bool(params) and all(is_managed(param) for param in params)
        if not managed or config_or_bf16().layout == "stock":
            return layout
        return align_buckets(layout, data_parallel_world_size, divisor)


def align_buckets(layout: PerBufferParamLayout, dp_size: int, divisor: int) -> PerBufferParamLayout:
    """Return ``layout`` with bucket ends from :func:`~moe_optim.buckets.layout.aligned_end`."""
    index_map: dict[torch.nn.Parameter, tuple[int, int, int]] = {}
    bounds: list[tuple[int, int]] = []
    end = 0
    for bucket_id, (stock_start, _) in enumerate(layout.bucket_indices):
        start, slots = end, []
        for param, (first, last, its_bucket) in layout.param_index_map.items():
            if its_bucket == bucket_id:
                storage = param.quantized_storage
                first, last = first - stock_start, last - stock_start
                slots.append(Slot(name=storage.name, start=first, shape=storage.shape))
                index_map[param] = (start + first, start + last, bucket_id)
        end = start + aligned_end(storage.format, slots, dp_size=dp_size, divisor=divisor).numel
        bounds.append((start, end))
    return replace(layout, param_index_map=index_map, bucket_indices=bounds)


class GroupedParamAndGradBuffer(_ParamAndGradBuffer):
    """Megatron's buffer, which is *managed* if it holds quantized weights.

    A managed buffer's ``param_data`` is a :class:`ParamData`, and each of its buckets has a
    :class:`ManagedBucket` as ``bucket.managed``. Buffers of other parameters are byte-identical to
    Megatron's.

    Attributes:
        groups: bucket groups of this buffer; empty until they are created.
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
        self.groups: list[Any] = []
        if holds_matrices([param for param, _ in params_with_names]):
            ddp_config = _sharding_matrices(ddp_config)
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
                "moe_optim: expected --use-distributed-optimizer, since "
                f"{params_with_names[0][1]} is quantized, got a model that is wrapped without it. "
                f"{_how_to_distribute()}, or set format: bf16."
            )
        if not self.managed:
            super().__init__(
                ddp_config, param_dtype, grad_dtype, params_with_names, *args, **kwargs
            )
            return
        for param, name in params_with_names:
            storage_of(param).name = name
            _require_marked(param, name)
        # Makes Megatron's constructor keep the storage of the weights. A copy, since nothing else
        # may see the flag, and its own check requires Transformer Engine.
        sharing_config = copy.copy(ddp_config)
        sharing_config.reuse_grad_buf_for_mxfp8_param_ag = True
        super().__init__(
            sharing_config, param_dtype, grad_dtype, params_with_names, *args, **kwargs
        )
        self.ddp_config = ddp_config
        self.param_data = ParamData(
            [param.quantized_storage for param in self.params],
            before_read=self._prepare_to_read,
            leaves=self._weights_leave,
            returned=self._weights_returned,
        )
        for bucket in self.buckets:
            managed = bucket.managed
            watched = bucket.grad_data.data  # views share its version counter
            apart = set(bucket.params_with_extra_main_grads)
            for param in bucket.params_list:
                _note_gradients(param)
                first, last = bucket.param_to_index[param]
                view = watched[first:last].view_as(param.main_grad)
                if param in apart:
                    param.main_grad_copy_in_grad_buffer = view
                else:
                    param.main_grad = view
            managed.watch(watched, [param.main_grad for param in apart])

    @property
    def has_nvfp4_params(self) -> bool:
        """Whether Megatron packs NVFP4 bytes; managed weights are packed already."""
        return self._has_nvfp4_params and not self.managed

    @has_nvfp4_params.setter
    def has_nvfp4_params(self, found: bool) -> None:
        self._has_nvfp4_params = found

    def _new_bucket(self, *args: Any, **kwargs: Any) -> _ParamAndGradBucket:
        bucket = super()._new_bucket(*args, **kwargs)
        if self.managed:
            names = [param.quantized_storage.name for param in bucket.params_list]
            where = names[0] if len(names) == 1 else f"{names[-1]} to {names[0]}"
            bucket.param_data = bucket.grad_data[:0]  # Megatron only takes a view
            config = config_or_bf16()
            bucket.managed = ManagedBucket(
                f"bucket {bucket.bucket_id} ({where})",
                bucket.params_list,
                [bucket.param_to_index[param][0] for param in bucket.params_list],
                bucket.grad_data,
                dp_size=self.data_parallel_world_size,
                wire=config.wire,
                backend=config.backend,
            )
        return bucket

    def reset(self) -> None:
        """Zero the gradients, after finishing collectives that use their memory.

        Also drops ``grad`` tensors left by an exception in a backward pass.
        """
        for group in self.groups:
            group.finish_communication()
        if not self.managed:
            require_gradient_memory("parameter buffer", "zero_grad_buffer", self.grad_data)
            super().reset()
            return
        for param in self.params:
            if param.grad is not None:
                param.grad = None
        for bucket in self.buckets:
            bucket.managed.zero()

    def offload_to_cpu(self, move_params: bool = True, move_grads: bool = True) -> None:
        """Free gradient memory and move weights to the host, after finishing collectives in flight.

        Until :meth:`reload_from_cpu`, managed weights cannot be read, written or gathered.
        """
        if move_params:
            self._require_held()
        for group in self.groups:
            if move_params:
                group.finish_gather()
            if move_grads:
                group.finish_communication()
        super().offload_to_cpu(move_params, move_grads)

    def reload_from_cpu(self, move_params: bool = True, move_grads: bool = True) -> None:
        """Reallocate weights and gradients; gradients are zeroed."""
        was_offloaded = self.grad_data_size > 0
        super().reload_from_cpu(move_params, move_grads)
        if self.managed and move_grads and was_offloaded:
            for bucket in self.buckets:
                bucket.managed.zero()
                if bucket.managed.gather.uses_gradient_memory:
                    bucket.managed.forget_masters()  # the memory may have moved

    def _prepare_to_read(self) -> None:
        self._require_held()
        for group in self.groups:
            group.finish_gather()

    def _require_held(self) -> None:
        for bucket in self.buckets if self.managed else ():
            bucket.managed.require_held()

    def _weights_leave(self) -> None:
        for bucket in self.buckets:
            bucket.managed.state.record(Event.OFFLOAD)

    def _weights_returned(self) -> None:
        for bucket in self.buckets:
            bucket.managed.state.record(Event.RELOAD)
            bucket.managed.forget_masters()  # plans hold addresses


def _sharding_matrices(ddp_config: Any) -> Any:
    """Return a configuration with which Megatron's dev branch shards the buffers of matrices."""
    if not hasattr(ddp_config, "use_layer_wise_param_layout"):
        return ddp_config
    ddp_config = copy.copy(ddp_config)
    ddp_config.use_layer_wise_param_layout = True
    return ddp_config


def _how_to_distribute() -> str:
    if installed_optimizer() == "adam":
        return 'Give the flag (Muon: install with optimizer="muon", or take MoEOptimizerConfig)'
    return (
        "Megatron's validation clears it for Muon, and so do recipes of Megatron-Bridge: set "
        "use_distributed_optimizer and clear use_layer_wise_distributed_optimizer before the model "
        "is wrapped, in validated arguments, or in the configurations of DDP and the optimizer, as "
        "--use-moe-grouped-optim and MoEOptimizerConfig do"
    )


def _require_marked(param: Any, name: str) -> None:
    """Raise ConfigError if nothing says whether ranks of expert parallelism share experts.

    Megatron would average gradients of different experts.
    """
    group = parallel_state.get_expert_model_parallel_group(check_initialized=False)
    is_marked = hasattr(param, "allreduce") or not isinstance(param, GroupedWeight)
    if not is_marked and group is not None and group.size() > 1:
        raise ConfigError(
            f"{name}.allreduce: expected False for experts that other ranks of expert parallelism "
            "do not hold, or True for those that all hold, got none, with which Megatron averages "
            "gradients over all data-parallel ranks. Set it before the model is wrapped."
        )


def _note_gradients(weight: Any) -> None:
    """Register the hook that reports gradients to the bucket, once per weight."""
    if not any(type(hook) is GradientNote for hook in (weight._backward_hooks or {}).values()):
        weight.register_hook(GradientNote(weight))
