"""GEMM operands of bf16 experts: the contiguous weights, or a quantized copy of them."""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_optim.formats import BlockScaledFormat, Direction
from moe_optim.kernels.member_table import Backend, MemberTable, TableEntry
from moe_optim.weights.storage import PortableStorage

if TYPE_CHECKING:
    from moe_optim.calibration.fake_quantization import PerExpertGrid

_ALIGNMENT = 16  # bytes, required by grouped GEMMs for strides and addresses


class _Copy[Format]:
    """A copy of bf16 weights [E, R, C] in another format."""

    def __init__(
        self, format: Format, shape: tuple[int, int, int], name: str, backend: Backend
    ) -> None:
        self.format, self.shape, self.name, self.backend = format, shape, name, backend

    def __reduce__(self) -> Any:
        """Copy and pickle without buffers and amaxes, which are derived from the weights."""
        return type(self), (self.format, self.shape, self.name, self.backend)


class QuantizedCopy(_Copy[BlockScaledFormat]):
    """Values of bf16 weights in a block-scaled format, quantized in one call.

    Every forward GEMM renews the copy, since torch cannot detect all writes to bf16 weights:
    optimizer and gather write through the DDP buffer, others through ``data``. A dgrad reads the
    copy of the last forward GEMM.
    """

    _storage: PortableStorage | None = None
    _table: MemberTable | None = None
    _places: tuple[int, ...] = ()  # addresses of the weights in the table
    _made_of: tuple[int, ...] | None = None  # versions of the weights in the copy

    @torch.no_grad()
    def dequantize(
        self,
        weights: Sequence[Tensor],
        direction: Direction,
        *,
        keep: bool,
        amax: Tensor | None = None,
        group: Any = None,  # noqa: ARG002
    ) -> Tensor:
        """Return the values of one direction, [E, R, C] bf16, newly allocated.

        Weights are contiguous bf16, one tensor [E, R, C] or E of [R, C]. The forward GEMM reads
        rowwise values and dgrad columnwise ones, from the same copy with ``keep``. Blocks have
        scales of their own, so ``amax`` and ``group`` are ignored.
        """
        places = tuple(weight.data_ptr() for weight in weights)
        if self._storage is None or self._table is None or places != self._places:
            self._storage, self._table = self._lay_out(weights)
            self._places, self._made_of = places, None
        now = tuple(weight._version for weight in weights)
        if direction == "rowwise" or now != self._made_of:
            self._table.launch()
            self._table.finish.launch()
            self._made_of = now if keep else None
        return self._storage.dequantize(direction)

    def clip_wgrad(self, weights: Sequence[Tensor], wgrad: Tensor, amax: Tensor | None) -> Tensor:
        """Return the weight gradient unchanged: block scaling clips nothing."""
        return wgrad

    @torch.inference_mode(False)  # an evaluation may create buffers that training writes
    def _lay_out(self, weights: Sequence[Tensor]) -> tuple[PortableStorage, MemberTable]:
        storage = PortableStorage(self.format, self.shape, name=self.name, device=weights[0].device)
        targets = [storage.quantized]
        if weights[0].dim() == 2:
            targets = [storage.expert(index).quantized for index in range(len(weights))]
        entries = [
            TableEntry(parameter=self.name, source=one.detach().view(target.shape), target=target)
            for one, target in zip(weights, targets, strict=True)
        ]
        return storage, MemberTable.build(entries, backend=self.backend)


class FakeQuantizedCopy(_Copy["PerExpertGrid"]):
    """Nearest values of bf16 weights on a grid with one amax per expert.

    Each forward GEMM computes them in one launch, and its dgrad recomputes them from the kept
    amaxes. Calibrated amaxes clip, with zero gradient for clipped weights; without calibration the
    current amaxes are used, and nothing is clipped.
    """

    _kept: Tensor | None = None  # amaxes of the last forward GEMM in training

    @torch.no_grad()
    def dequantize(
        self,
        weights: Sequence[Tensor],
        direction: Direction,
        *,
        keep: bool,
        amax: Tensor | None,
        group: Any = None,
    ) -> Tensor:
        """Return the values of all experts, [E, R, C] bf16, newly allocated, in either direction.

        Weights are contiguous bf16, one tensor [E, R, C] or E of [R, C]. ``keep`` keeps the amaxes
        of a forward GEMM (rowwise) for its dgrad (columnwise); without it, both find their own.
        Without ``amax``, ranks of ``group`` hold parts of the same experts, and all of them must
        call it.
        """
        from moe_optim.calibration.fake_operations import fake_quantized

        found = self._kept if keep and direction == "columnwise" else None
        if found is None:
            found = live_amax(weights, group) if amax is None else amax.flatten()
        self._kept = found if keep else None
        plain = [weight.detach() for weight in weights]
        values = fake_quantized(plain, found, self.format.bits, False, self.backend)
        return values.view(self.shape)

    @torch.no_grad()
    def clip_wgrad(self, weights: Sequence[Tensor], wgrad: Tensor, amax: Tensor | None) -> Tensor:
        """Return the weight gradient [E, R, C], zero where a calibrated amax clips the weight."""
        if amax is None:
            return wgrad
        from moe_optim.calibration.fake_operations import clipped_gradient

        plain = [weight.detach() for weight in weights]
        parts = [wgrad] if weights[0].dim() == 3 else list(wgrad.unbind(0))
        return clipped_gradient(plain, amax.flatten(), parts, self.backend).view(self.shape)


def make_copy(
    compute: "BlockScaledFormat | PerExpertGrid",
    shape: tuple[int, int, int],
    name: str,
    backend: Backend,
) -> QuantizedCopy | FakeQuantizedCopy:
    """Return what quantizes weights [E, R, C] to ``compute``; LayoutError if they do not fit."""
    if not isinstance(compute, BlockScaledFormat):
        return FakeQuantizedCopy(compute, shape, name, backend)
    compute.check_shape(shape, name)
    return QuantizedCopy(compute, shape, name, backend)


def copies_of(module: torch.nn.Module) -> Any:
    """Return the ``WeightCopies`` of a linear of Transformer Engine, None if GEMMs read weights."""
    copies = vars(module).get("_get_weight_tensors")
    return copies if hasattr(copies, "begin_step") else None


def copies_in(model: torch.nn.Module) -> Iterator[Any]:
    """Yield :func:`copies_of` all linears of a model that have them."""
    yield from filter(None, map(copies_of, model.modules()))


def live_amax(weights: Sequence[Tensor], group: Any = None) -> Tensor:
    """Return the largest magnitude of every expert, [E] in the weights' dtype; NaN propagates.

    With a ``group`` of ranks that hold parts of the same experts it is of whole experts, in fp32,
    and all of them must call it.
    """
    if weights[0].dim() == 3:
        amax = torch.linalg.vector_norm(weights[0], math.inf, dim=(1, 2))
    else:
        amax = torch.stack(torch._foreach_norm(list(weights), math.inf))
    if group is not None and group.size() > 1:
        amax = amax.float()
        dist.all_reduce(amax, dist.ReduceOp.MAX, group=group)
    return amax


def stack_experts(experts: Sequence[Tensor]) -> Tensor:
    """Return experts [R, C] as one detached tensor [E, R, C], a view if :func:`lie_together`."""
    if not lie_together(experts):
        return torch.stack([expert.detach() for expert in experts])
    rows, cols = experts[0].shape
    shape = (len(experts), rows, cols)
    return experts[0].detach().as_strided(shape, (_distance(experts), cols, 1))


def lie_together(experts: Sequence[Tensor]) -> bool:
    """Return whether experts can be viewed as one tensor without a copy."""
    first, step = experts[0], _distance(experts)
    size = first.element_size()
    end = first.storage_offset() + (len(experts) - 1) * step + first.numel()
    return (
        step >= first.numel()
        and step * size % _ALIGNMENT == 0
        and first.data_ptr() % _ALIGNMENT == 0
        and end * size <= first.untyped_storage().nbytes()
        and all(
            expert.data_ptr() == first.data_ptr() + index * step * size and expert.is_contiguous()
            for index, expert in enumerate(experts)
        )
    )


def _distance(experts: Sequence[Tensor]) -> int:
    """Return the elements from the first expert to the second, or the size of a single expert."""
    if len(experts) == 1:
        return experts[0].numel()
    return (experts[1].data_ptr() - experts[0].data_ptr()) // experts[0].element_size()
