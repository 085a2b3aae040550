"""What the launches read and write that cast masters to weights with one scale each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor

from moe_optim.errors import LayoutError
from moe_optim.kernels.bound_kernel import BoundKernel
from moe_optim.kernels.member_table import Backend, has_kernels
from moe_optim.kernels.tuning import TENSORWISE_PART
from moe_optim.places import Places, addresses_of

PART_FIELDS = 5
"""Columns of :attr:`TensorwiseTable.parts`."""

_ALIGNMENT = 16  # bytes of the widest memory access


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScaledWeight:
    """What a rank owns of a weight with one scale."""

    master: Tensor
    """[n] fp32, contiguous, the optimizer's own tensor; may be empty."""
    data: Tensor
    """[n] uint8, contiguous: where the E4M3 codes of these elements lie."""
    scale_inv: Tensor
    """[1] fp32: what codes are multiplied by, of the whole weight."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TensorwiseTable:
    """Masters where they lie, and where their codes and scales go. See :meth:`build`.

    On a GPU it holds addresses, and no launch may be made once masters have moved.
    """

    weights: tuple[ScaledWeight, ...]
    """All of them, in the same order on every rank, whoever owns what."""
    amaxes: Tensor
    """[num_weights] fp32: of what this rank owns, then, reduced with MAX, of the whole weights."""
    scales: Tensor
    """[num_weights] fp32, written by the cast."""
    has_kernels: bool
    """Whether kernels cast, or the reference does."""
    parts: Mapping[bool, Tensor]
    """[num_parts, 5] int64, by whether they begin at multiples of 16 bytes on both sides: the
    addresses of master and codes, how many elements, the weight, and the slot of the maximum."""
    bounds: Tensor
    """[num_weights + 1] int64: the slots of each weight follow those of the one before."""
    slots: Tensor
    """[num_slots] fp32: the largest magnitude of each part."""
    inverses: Tensor
    """[num_weights] int64: the address of each ``scale_inv``."""
    masters: Places
    finding: list[BoundKernel] = field(default_factory=list)
    """Find ``amaxes``; filled by the first launch."""
    casting: list[BoundKernel] = field(default_factory=list)
    """Write scales and codes; filled by the first launch."""

    @property
    def has_moved(self) -> bool:
        """Whether masters lie elsewhere by now: their memory can be freed or exchanged."""
        return self.masters.have_moved

    @classmethod
    def build(
        cls, weights: Sequence[ScaledWeight], *, backend: Backend = "auto"
    ) -> "TensorwiseTable":
        """Describe weights on their device; nothing is copied.

        Args:
            weights: at least one, all on one device.
            backend: ``auto`` takes kernels where they run, ``reference`` does without.

        Raises:
            LayoutError: tensors of other shapes or dtypes, or on several devices.
        """
        device = weights[0].scale_inv.device
        for index, one in enumerate(weights):
            _check(one, f"tensorwise table: weights[{index}]", device)
        runs = backend == "auto" and has_kernels(device)
        parts, bounds = _cut_parts(weights if runs else [])
        return cls(
            weights=tuple(weights),
            amaxes=torch.zeros(len(weights), dtype=torch.float32, device=device),
            scales=torch.ones(len(weights), dtype=torch.float32, device=device),
            has_kernels=runs,
            parts=MappingProxyType({key: rows.to(device) for key, rows in parts.items()}),
            bounds=bounds.to(device),
            slots=torch.zeros(int(bounds[-1]), dtype=torch.float32, device=device),
            inverses=_on_cpu(addresses_of(one.scale_inv for one in weights)).to(device),
            masters=Places(one.master for one in weights),
        )


def _check(one: ScaledWeight, where: str, device: torch.device) -> None:
    wanted = {
        "master": (one.master, one.master.numel(), torch.float32),
        "data": (one.data, one.master.numel(), torch.uint8),
        "scale_inv": (one.scale_inv, 1, torch.float32),
    }
    for name, (tensor, numel, dtype) in wanted.items():
        is_flat = tuple(tensor.shape) == (numel,) and tensor.is_contiguous()
        if not is_flat or tensor.dtype != dtype or tensor.device != device:
            raise LayoutError(
                f"{where}: {name}: expected [{numel}] {dtype} on {device}, contiguous, got "
                f"{list(tensor.shape)} {tensor.dtype} on {tensor.device} with strides "
                f"{list(tensor.stride())}. Pass a flat view of what this rank owns."
            )


def _cut_parts(weights: Sequence[ScaledWeight]) -> tuple[dict[bool, Tensor], Tensor]:
    """Return the parts by alignment, and the bounds of the weights; on the CPU."""
    masters = _on_cpu(addresses_of(one.master for one in weights))
    codes = _on_cpu(addresses_of(one.data for one in weights))
    numels = _on_cpu([one.master.numel() for one in weights])
    counts = (numels + TENSORWISE_PART - 1) // TENSORWISE_PART
    bounds = torch.cat([_on_cpu([0]), counts.cumsum(0)])

    slots = torch.arange(int(bounds[-1]), device="cpu")
    which = torch.arange(len(weights), device="cpu").repeat_interleave(counts)
    first = (slots - bounds[which]) * TENSORWISE_PART
    lengths = torch.minimum(numels[which] - first, _on_cpu([TENSORWISE_PART]))
    rows = [masters[which] + 4 * first, codes[which] + first, lengths, which, slots]
    parts = torch.stack(rows, 1)
    aligned = (masters | codes)[which] % _ALIGNMENT == 0
    return {key: parts[aligned == key] for key in (True, False) if (aligned == key).any()}, bounds


def _on_cpu(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu")
