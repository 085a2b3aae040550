"""How the parameters of experts are cut over ranks: their attributes and their checkpoint keys."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_object_for_checkpoint
from torch import Tensor

from moe_optim.experts.keys.layouts import LINEARS
from moe_optim.experts.wrapped import grouped_linear_of
from moe_optim.weights.grouped_weight import GroupedWeight

Offset = tuple[int, int, int]
"""Axis of the global tensor, place on it, number of places."""

CUTS = {  # axis of one expert's tensor that tensor parallelism cuts, and parts that are cut apart
    "linear_fc1.weight": (0, 2),  # the rows of gate and up
    "linear_fc1.bias": (0, 2),
    "linear_fc2.weight": (1, 1),
    "linear_fc2.bias": (None, 1),  # every rank holds the whole
}
"""How expert tensor parallelism cuts the tensors of an expert."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertShard:
    """One parameter of the experts: of all local ones, or of one of them."""

    linear: str
    """``linear_fc1`` or ``linear_fc2``."""
    name: str
    """In the linear: ``weight``, ``weight0``, ``bias``, ``bias0`` and so on."""
    parameter: torch.nn.Parameter

    @property
    def kind(self) -> str:
        """``weight`` or ``bias``."""
        return self.name.rstrip("0123456789")

    @property
    def expert(self) -> int | None:
        """Local index; None where all experts are one parameter."""
        index = self.name.removeprefix(self.kind)
        return int(index) if index else None

    @property
    def cut(self) -> tuple[int | None, int]:
        """The axis of one expert that is cut over ranks, if any, and in how many parts it is."""
        return CUTS[f"{self.linear}.{self.kind}"]

    def dim(self, axis: int) -> int:
        """Return which dimension of the parameter an axis of one expert is."""
        return axis + (self.expert is None)

    def describe(self, config: TransformerConfig) -> None:
        """Set what reductions and norms of Megatron read, as the linears of its own experts do."""
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
        self, prefix: str, place: Offset, sharded_offsets: tuple[Offset, ...], groups: Any
    ) -> ShardedTensorFactory:
        """Return the parameter under Megatron's key for all experts.

        Args:
            prefix: of the experts' keys.
            place: of the expert, or of all local ones, among all.
            sharded_offsets: of the axes before that of the experts.
            groups: process groups; ``expt_tp`` and ``expt_dp`` are used.
        """
        axis, parts = self.cut
        rank, size = groups.expt_tp.rank(), groups.expt_tp.size()
        piece_dim = self.dim(axis or 0)

        def build(key: str, tensor: Tensor, replica_id: Any, _flat: Any = None) -> list[Any]:
            # the optimizer calls this too, with its fp32 states in place of the weight
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
            lambda pieces: torch.cat(pieces, dim=piece_dim),
            _replica_id(groups, is_cut=axis is not None),
        )


def list_shards(experts: torch.nn.Module) -> Iterator[ExpertShard]:
    """Return every parameter of ``linear_fc1`` and ``linear_fc2``, in that order.

    Those of adapters around them are none of experts.

    Raises:
        LayoutError: something that hides a linear stands in its place.
    """
    for linear in LINEARS:
        for name, parameter in grouped_linear_of(experts, linear).named_parameters(recurse=False):
            yield ExpertShard(linear=linear, name=name, parameter=parameter)


def empty_extra_state(
    key: str, place: Offset, sharded_offsets: tuple[Offset, ...], groups: Any
) -> Any:
    """Return the empty object that Megatron's linears save for an expert, and ask for."""
    return make_sharded_object_for_checkpoint(
        None, key, (*sharded_offsets, place), replica_id=_replica_id(groups, is_cut=False)
    )


def _replica_id(groups: Any, *, is_cut: bool) -> tuple[int, int, int]:
    """Return which copy this rank holds of what tensor parallelism cuts, or does not."""
    return 0, 0 if is_cut else groups.expt_tp.rank(), groups.expt_dp.rank()
