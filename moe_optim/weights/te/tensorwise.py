"""Per-tensor scaling in Transformer Engine: weights cast from masters, transposed after a gather.

All weights take a few launches, where Transformer Engine takes one or two a weight.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_optim.kernels.finish_table import FinishTable
from moe_optim.kernels.plan import is_capturing, runs_triton
from moe_optim.kernels.tensorwise import ScaledWeight, TensorwiseTable
from moe_optim.places import Attributes
from moe_optim.weights.te.fields import is_tensorwise, require_memory


def codes_and_scale(weight: Any) -> tuple[Tensor, Tensor]:
    """Return the E4M3 codes of a weight, uint8 [R, C], and what they are multiplied by, fp32 [1].

    Views of what the weight has; on ``meta`` where it is there.

    Raises:
        StateError: they are offloaded.
    """
    require_memory(type(weight).__name__, weight)
    return weight._data, weight._scale_inv.view(1)


class TensorwiseCast:
    """What Megatron's ``quantize_param_shard`` does to weights that :func:`can_cast`.

    It writes the same bytes, and leaves to Megatron what follows the gather of them.

    Args:
        weights: weights of all ranks that share them, in the same order on each.
        masters: [n] fp32 of what this rank owns of each, the optimizer's own tensors; or None.
        starts: first element of each master, counted in the weight; None where there is none.

    Attributes:
        fields: bytes and scales of the weights; where others are there, or masters have moved, the
            cast has to be made anew.
    """

    def __init__(
        self,
        weights: Sequence[Any],
        masters: Sequence[Tensor | None],
        starts: Sequence[int | None],
    ) -> None:
        nothing = torch.empty(0, dtype=torch.float32, device=weights[0].device)
        entries = []
        for weight, master, start in zip(weights, masters, starts, strict=True):
            first, own = start or 0, nothing if master is None else master
            data = weight._data.view(-1)[first : first + own.numel()]
            scale_inv = weight._scale_inv.view(1)
            entries.append(ScaledWeight(master=own, data=data, scale_inv=scale_inv))
            if hasattr(weight, "clear_high_precision_init_val"):
                weight.clear_high_precision_init_val()  # masters have been made of it
        self._table = TensorwiseTable.build(entries)
        self.fields = Attributes.of(weights, ("_data", "_scale_inv"))

    def run(self, group: dist.ProcessGroup) -> None:
        """Cast what this rank owns. Every rank of the group must call it; nothing has moved.

        Args:
            group: ranks that own the rest of each weight.
        """
        self._table.find_amaxes.launch()
        dist.all_reduce(self._table.amaxes, dist.ReduceOp.MAX, group=group)
        self._table.launch()


def can_cast(weights: Sequence[Any]) -> bool:
    """Return whether a :class:`TensorwiseCast` knows how each of some weights is quantized.

    It must be E4M3 of bf16 values, its scale neither floored nor rounded. All ranks say the same,
    since their classes and recipes are alike.
    """
    return bool(weights) and all(
        is_tensorwise(weight)
        and getattr(weight, "_data", None) is not None
        and weight.dtype == torch.bfloat16
        and weight._quantizer.dtype.name == "kFloat8E4M3"
        and not weight._quantizer.force_pow_2_scales
        and not weight._quantizer.amax_epsilon
        for weight in weights
    )


_CAPTURED: set[FinishTable] = set()
"""What launches of a CUDA graph read at every replay, long after it was last asked for."""


class Transposes:
    """The transposes that GEMMs of a Hopper read, of weights that have one. See :meth:`of`."""

    def __init__(self, weights: Sequence[Any]) -> None:
        self._table = FinishTable.of_transposes([(one._data, one._transpose) for one in weights])
        self._fields = Attributes.of(weights, ("_data", "_transpose"), ("_transpose_invalid",))

    @classmethod
    def of(cls, weights: Sequence[Any]) -> "Transposes | None":
        """Return what renews the transposes of some weights, None where a kernel cannot.

        Transformer Engine makes a transpose of its own when one is first wanted, or is known to be
        of other bytes. While a CUDA graph is captured nothing can be planned.
        """
        if not weights or not all(map(_has_transpose, weights)):
            return None
        return None if is_capturing(weights[0].device) else cls(weights)

    @property
    def have_moved(self) -> bool:
        """Whether bytes or transposes lie elsewhere by now, or are known to differ."""
        return self._fields.have_moved

    def renew(self) -> None:
        """Make every transpose that of the present bytes, in one launch; nothing has moved."""
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
