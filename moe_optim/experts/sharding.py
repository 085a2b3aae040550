"""Checkpoint keys of portable experts, and their sharding under tensor parallelism."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    make_sharded_object_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor

from moe_optim.errors import LayoutError
from moe_optim.experts.grouped_linear import GroupedLinear
from moe_optim.experts.keys.layouts import LINEARS
from moe_optim.weights.grouped_weight import GroupedWeight
from moe_optim.weights.names import ADAPTER, base_of, is_wrapper

if TYPE_CHECKING:
    from moe_optim.calibration.state_entries import Offset

CUTS = {
    "linear_fc1.weight": (0, 2),  # rows of gate and up
    "linear_fc1.bias": (0, 2),
    "linear_fc2.weight": (1, 1),
    "linear_fc2.bias": (None, 1),  # replicated
}
"""Sharded axis of one expert's tensor under expert tensor parallelism, if any, and the number of
parts that are each sharded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertShard:
    """One parameter of the experts, of all local ones or of a single one."""

    linear: str  # linear_fc1 or linear_fc2
    name: str  # name in the linear: weight, weight0, bias, bias0 and so on
    parameter: torch.nn.Parameter

    @property
    def kind(self) -> str:
        """``weight`` or ``bias``."""
        return self.name.rstrip("0123456789")

    @property
    def expert(self) -> int | None:
        """Local index; None if the parameter holds all experts."""
        index = self.name.removeprefix(self.kind)
        return int(index) if index else None

    @property
    def cut(self) -> tuple[int | None, int]:
        """Its entry in :data:`CUTS`."""
        return CUTS[f"{self.linear}.{self.kind}"]

    def dim(self, axis: int) -> int:
        """Return the dimension of the parameter for an axis of one expert."""
        return axis + (self.expert is None)

    def describe(self, config: TransformerConfig) -> None:
        """Set the attributes that Megatron's reductions and norms read, as its own experts do."""
        attributes: Any = self.parameter
        attributes.allreduce = config.expert_model_parallel_size == 1 and (
            config.expert_tensor_parallel_size == config.tensor_model_parallel_size
        )
        axis, parts = self.cut
        if axis is None:
            attributes.sequence_parallel = config.sequence_parallel
        else:
            set_tensor_model_parallel_attributes(self.parameter, True, self.dim(axis), parts)

    def sharded(
        self, prefix: str, place: "Offset", sharded_offsets: "tuple[Offset, ...]", groups: Any
    ) -> ShardedTensorFactory:
        """Return the parameter under Megatron's key for all experts.

        ``place`` is the global index of the expert, or of all local ones.
        """
        axis, parts = self.cut
        rank, size = groups.expt_tp.rank(), groups.expt_tp.size()
        piece_dim = self.dim(axis or 0)

        def build(key: str, tensor: Tensor, replica_id: Any, _flat: Any = None) -> list[Any]:
            # the optimizer also calls this, with fp32 states in place of the weight
            values = tensor.dequantize() if isinstance(tensor, GroupedWeight) else tensor
            pieces = []
            for part, piece in enumerate(values.chunk(parts, dim=piece_dim)):
                offsets = [*sharded_offsets, place]
                if axis is not None:
                    offsets.append((place[0] + 1 + axis, part * size + rank, parts * size))
                pieces.append(
                    ShardedTensor.from_rank_offsets(
                        key,
                        piece,
                        *offsets,
                        replica_id=replica_id,
                        prepend_axis_num=len(sharded_offsets) + (self.expert is not None),
                    )
                )
            return pieces

        return ShardedTensorFactory(
            f"{prefix}{self.linear}.{self.kind}",
            self.parameter,
            build,
            lambda pieces: _joined(pieces, piece_dim),
            _replica_id(groups, is_cut=axis is not None),
        )


def _joined(pieces: list[Tensor], dim: int) -> Tensor:
    """Return pieces as one tensor, without a copy if they follow each other in memory."""
    first, ends = pieces[0], list(accumulate(piece.shape[dim] for piece in pieces))
    steps = [end * first.stride(dim) * first.itemsize for end in [0, *ends[:-1]]]
    storage = first.untyped_storage().data_ptr()
    if any(
        piece.untyped_storage().data_ptr() != storage
        or piece.data_ptr() != first.data_ptr() + step
        or piece.stride() != first.stride()
        for piece, step in zip(pieces, steps, strict=True)
    ):
        return torch.cat(pieces, dim=dim)
    shape = [*first.shape[:dim], ends[-1], *first.shape[dim + 1 :]]
    return first.as_strided(shape, first.stride())


def grouped_linear_of(experts: torch.nn.Module, name: str) -> GroupedLinear:
    """Return a linear of portable experts, unwrapping an adapter; raise LayoutError if replaced."""
    module: torch.nn.Module = getattr(experts, name)
    base = base_of(module)
    if isinstance(base, GroupedLinear):
        return base
    from moe_optim.calibration.linears import unknown_wrapper

    raise unknown_wrapper(name, module)


def list_shards(experts: torch.nn.Module) -> Iterator[ExpertShard]:
    """Yield every parameter of ``linear_fc1`` and ``linear_fc2``, except those of adapters."""
    for linear in LINEARS:
        for name, parameter in grouped_linear_of(experts, linear).named_parameters(recurse=False):
            yield ExpertShard(linear=linear, name=name, parameter=parameter)


def empty_extra_state(
    key: str, place: "Offset", sharded_offsets: "tuple[Offset, ...]", groups: Any
) -> Any:
    """Return the empty object that Megatron's linears save and load per expert."""
    return make_sharded_object_for_checkpoint(
        None, key, (*sharded_offsets, place), replica_id=_replica_id(groups, is_cut=False)
    )


def _replica_id(groups: Any, *, is_cut: bool) -> tuple[int, int, int]:
    return 0, 0 if is_cut else groups.expt_tp.rank(), groups.expt_dp.rank()


def adapter_states(
    experts: Any, prefix: str, sharded_offsets: tuple[Any, ...], metadata: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the states of adapters around linears, under the keys of Megatron-Bridge.

    LayoutError if several ranks share an adapter without ``sharded_state_dict``.
    """
    state: dict[str, Any] = {}
    groups = experts.pg_collection
    for name in LINEARS:
        module = getattr(experts, name)
        if not is_wrapper(module):
            continue
        adapter = module.get_submodule(ADAPTER)
        ranks = groups.ep.size() * groups.expt_tp.size()
        if ranks > 1 and not hasattr(adapter, "sharded_state_dict"):
            raise LayoutError(
                f"{grouped_linear_of(experts, name).name}: expected an adapter that has a "
                f"sharded_state_dict(), since {ranks} ranks have experts or parts of their own, "
                f"got {type(adapter).__name__}, of which one rank's would be saved for all. Give "
                "it one, as Megatron-Bridge's adapters have."
            )
        own = sharded_state_dict_default(
            adapter, f"{name}.{ADAPTER}.", sharded_offsets, metadata, tp_group=groups.expt_tp
        )
        replace_prefix_for_sharding(own, f"{name}.", f"{prefix}experts.{name}.")
        state |= {f"{prefix}{key}": value for key, value in own.items()}
    return state
