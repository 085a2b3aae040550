"""Per-tensor scaling in Transformer Engine: casts from masters, and transposes after a gather.

All weights share a few launches, where Transformer Engine launches one or two kernels per weight.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_optim.kernels.member_table import plan_transposes
from moe_optim.kernels.plan import Plan, is_capturing, runs_triton
from moe_optim.kernels.tensorwise import ScaledWeight, TensorwiseTable
from moe_optim.places import Attributes
from moe_optim.weights.te.fields import is_tensorwise, quantizer_of, require_memory


def codes_and_scale(weight: Any) -> tuple[Tensor, Tensor]:
    """Return views of a weight's E4M3 codes, uint8 [R, C], and dequantization factor, fp32 [1]."""
    require_memory(type(weight).__name__, weight)
    return weight._data, weight._scale_inv.view(1)


class TensorwiseCast:
    """Replacement of Megatron's ``quantize_param_shard`` for weights that :func:`can_cast`.

    Writes the same bytes; Megatron still post-processes the gathered weights.

    Args:
        weights: weights of all ranks that share them, in the same order on every rank.
        masters: owned part of each weight, [n] fp32, the optimizer's own tensors; or None.
        starts: first element of each master, counted in the weight; None without a master.

    Attributes:
        fields: bytes and scales of the weights; rebuild the cast if they or the masters have moved.
    """

    def __init__(
        self, weights: Sequence[Any], masters: Sequence[Tensor | None], starts: Sequence[int | None]
    ) -> None:
        nothing = torch.empty(0, dtype=torch.float32, device=weights[0].device)
        entries = []
        for weight, master, start in zip(weights, masters, starts, strict=True):
            first, own = start or 0, nothing if master is None else master
            data = weight._data.view(-1)[first : first + own.numel()]
            scale_inv = weight._scale_inv.view(1)
            entries.append(ScaledWeight(master=own, data=data, scale_inv=scale_inv))
            if hasattr(weight, "clear_high_precision_init_val"):
                weight.clear_high_precision_init_val()  # masters already exist
        self._table = TensorwiseTable.build(entries)
        self.fields = Attributes.of(weights, ("_data", "_scale_inv"))

    def run(self, group: dist.ProcessGroup) -> None:
        """Cast the owned parts. Every rank of ``group`` must call it; no tensor may have moved."""
        self._table.find_amaxes.launch()
        dist.all_reduce(self._table.amaxes, dist.ReduceOp.MAX, group=group)
        self._table.launch()


def can_cast(weights: Sequence[Any]) -> bool:
    """Return whether :class:`TensorwiseCast` supports the quantization of all weights.

    Requires E4M3 from bf16, with a scale neither floored nor rounded. The result is the same on all
    ranks, since classes and recipes are.
    """
    return bool(weights) and all(
        is_tensorwise(weight)
        and getattr(weight, "_data", None) is not None
        and weight.dtype == torch.bfloat16
        and (quantizer := quantizer_of(weight)).dtype.name == "kFloat8E4M3"
        and not quantizer.force_pow_2_scales
        and not quantizer.amax_epsilon
        for weight in weights
    )


_CAPTURED: set[Plan] = set()
"""Tables that CUDA graphs read at every replay."""


class Transposes:
    """Transposes of tensorwise weights, which GEMMs on Hopper read. See :meth:`of`."""

    def __init__(self, weights: Sequence[Any]) -> None:
        self._table = plan_transposes([(one._data, one._transpose) for one in weights])
        self._fields = Attributes.of(weights, ("_data", "_transpose"), ("_transpose_invalid",))

    @classmethod
    def of(cls, weights: Sequence[Any]) -> "Transposes | None":
        """Return the transposes of some weights, or None if a kernel cannot renew them.

        Transformer Engine creates a missing or invalid transpose itself. Building is not possible
        during CUDA graph capture.
        """
        if not weights or not all(map(_has_transpose, weights)):
            return None
        return None if is_capturing(weights[0].device) else cls(weights)

    @property
    def have_moved(self) -> bool:
        """Whether bytes or transposes have moved, or a transpose is marked invalid."""
        return self._fields.have_moved

    def renew(self) -> None:
        """Recompute every transpose in one launch. No tensor may have moved."""
        if is_capturing(self._table.device):
            _CAPTURED.add(self._table)
        self._table.launch()


def _has_transpose(weight: Any) -> bool:
    data, transpose = (getattr(weight, name, None) for name in ("_data", "_transpose"))
    return (
        is_tensorwise(weight)
        and data is not None
        and transpose is not None
        and not weight._transpose_invalid
        and data.dim() == 2
        and transpose.shape == data.shape[::-1]
        and data.stride(1) == transpose.stride(1) == 1
        and runs_triton(data.device)
    )
