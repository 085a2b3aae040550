"""Compares two checkpoints element by element, across expert layouts."""

from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moe_optim.checkpoint.files.reader import FLAT_STATES, is_state
from moe_optim.commands.console.workers import run_in_workers
from moe_optim.commands.conversion.expert_finding import (
    check_row_order,
    find_experts,
    is_quantized,
    known_interleave,
    without_experts,
)
from moe_optim.commands.conversion.file_plan import (
    PIECE_BYTES,
    BytesDone,
    convert_experts,
    in_files,
    one_thread,
    ranges_of_experts,
    ranges_of_rows,
    read_experts,
)
from moe_optim.commands.conversion.layer_view import LayerView
from moe_optim.commands.conversion.model_sources import names_of
from moe_optim.errors import ConfigError
from moe_optim.experts.keys.layouts import ExpertSet, get_layout

GROUPED = get_layout("grouped")
"""Layout in which experts are compared."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A tensor, or one expert's slice of it, that differs between the sides."""

    name: str
    """Key of the tensor, in layout ``grouped`` for experts."""
    what: str
    """``values``, ``dtype``, ``shape``, ``only in A`` or ``only in B``."""
    expert: int | None = None
    """Number of the expert within its layer; None for other tensors."""
    differing: int = 0
    """Number of elements whose bits differ."""
    elements: int = 0
    """Number of elements of the expert or tensor."""
    first: tuple[int, ...] = ()
    """Index of the first differing element, within the expert if there is one."""
    largest: float | None = None
    """Largest absolute difference of values that are not NaN on either side; exact for integers."""
    detail: str = ""
    """Both shapes or dtypes, if they differ."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedCheckpoint:
    """A checkpoint and its experts."""

    view: LayerView
    """View of the checkpoint."""
    interleave: int
    """GLU interleave: number of gate rows that alternate with as many up rows; 0 puts all gate rows
    first.
    """
    sets: dict[str, ExpertSet]
    """Prefix -> experts."""
    others: tuple[str, ...]
    """Keys of all other tensors."""

    def nbytes(self, name: str) -> int:
        """Return the bytes of the experts at a prefix ``name``, or of a tensor; 0 without any."""
        keys = self.sets[name].keys if name in self.sets else (name,)
        return self.view.nbytes(key for key in keys if key in self.view.tensors)

    def read(self, prefix: str, experts: range) -> dict[str, Tensor]:
        """Return ``experts`` at ``prefix`` as ``grouped`` has them, gate rows before up rows.

        CPU tensors by key: weights [E, 2F, H] and [E, H, F], biases [E, 2F] and [E, H], in the
        dtype of the checkpoint.
        """
        one = self.sets[prefix]
        tensors = read_experts(self.view, one, experts)
        if one.layout == GROUPED and not self.interleave:
            return tensors
        target, rows = replace(one, layout=GROUPED), (self.interleave, 0)
        return convert_experts(tensors, experts, source=one, target=target, rows=rows)


@dataclass
class Comparison:
    """Result of a comparison."""

    tensors: int = 0
    """Number of compared tensors, in layout ``grouped``."""
    nbytes: int = 0
    """Bytes of the compared tensors on one side."""
    differences: list[Difference] = field(default_factory=list)
    """All differences, in key order."""
    notes: list[str] = field(default_factory=list)
    """Sentences on what was not compared, and why."""
    skipped: list[str] = field(default_factory=list)
    """Keys of flat states that were not compared because the bucket layouts differ."""

    @property
    def equal(self) -> bool | None:
        """Whether all tensors are equal; None if only skipped ones could differ."""
        if self.differences:
            return False
        return None if self.skipped else True


def find_side(
    view: LayerView, *, num_experts: int | None, weights_only: bool
) -> ComparedCheckpoint:
    """Find the experts of a checkpoint without reading tensor values.

    Args:
        view: view of the checkpoint.
        num_experts: experts per layer; None if keys and shapes determine it.
        weights_only: whether to skip optimizer state.

    Raises:
        LayoutError: experts are incomplete.
        ConfigError: the checkpoint records an unknown expert layout.
    """
    kept = [key for key in view.tensors if not (weights_only and is_state(key))]
    quantized = any(".experts." in key and is_quantized(view.tensors[key]) for key in kept)
    sets = [] if quantized else find_experts(view, kept, num_experts=num_experts)
    return ComparedCheckpoint(
        view=view,
        interleave=known_interleave(view, None),
        sets={one.prefix: one for one in sets},
        others=without_experts(kept, sets),
    )


@one_thread()
def compare_checkpoints(
    a: ComparedCheckpoint, b: ComparedCheckpoint, report: BytesDone, *, workers: int = 1
) -> Comparison:
    """Compare all tensors of two checkpoints.

    A process holds 16 MiB of each at a time, or a stored chunk or an expert where one is larger.

    Args:
        a: checkpoint named A in differences.
        b: checkpoint named B.
        report: progress callback; receives the bytes of A compared since its last call.
        workers: number of processes that share the tensors; the result is the same for any.

    Raises:
        ConfigError: one side has Hugging Face's names, the other Megatron's.
        LayoutError: the interleaving of expert rows is ambiguous.
        StateError: a file cannot be read, or a process died.
    """
    _require_same_names(a.view, b.view)
    result = Comparison()
    objects = [len(side.view.reader.objects) for side in (a, b)]
    if any(objects):
        result.notes.append(
            f"Objects other than tensors were not compared: {objects[0]} in A and {objects[1]} in "
            "B, such as arguments and random states."
        )
    sizes = [side.view.recorded.parallel_sizes.get("expert tensor", 1) for side in (a, b)]
    if a.interleave != b.interleave or sizes[0] != sizes[1]:
        for side in (a, b):
            check_row_order(side.view, side.interleave)
    keys = dict.fromkeys([*a.others, *b.others])
    if _flat_states_differ(a.view, b.view):
        result.skipped = [key for key in keys if FLAT_STATES in key]
        result.notes.append(
            f"Flat optimizer states, {len(result.skipped)} in all, were not compared: the two "
            "checkpoints lay them out differently. Save with --dist-ckpt-optim-fully-reshardable."
        )
    skipped = set(result.skipped)
    report(a.view.nbytes(key for key in skipped if key in a.view.tensors))
    names = [_Compared(prefix, True, a.nbytes(prefix)) for prefix in {**a.sets, **b.sets}]
    names += [_Compared(key, False, a.nbytes(key)) for key in keys if key not in skipped]
    batches = [*enumerate(in_files(names, PIECE_BYTES))]
    found: dict[int, Comparison] = {}
    for (number, batch), of_batch in run_in_workers(_compare, (a, b), batches, workers=workers):
        found[number] = of_batch
        report(sum(one.nbytes for one in batch))
    for _, one in sorted(found.items()):
        result.tensors += one.tensors
        result.nbytes += one.nbytes
        result.differences += one.differences
    return result


def _require_same_names(a: LayerView, b: LayerView) -> None:
    owners = [names_of(view.tensors) for view in (a, b)]
    if None not in owners and owners[0] != owners[1]:
        hf = (a, b)[owners.index("Hugging Face")].reader.path
        raise ConfigError(
            f"verify: expected names of one kind, got {owners[0]}'s in A and {owners[1]}'s in B. "
            f"Convert one first: moe-optim convert --to megatron {hf} DIR."
        )


class _Compared(NamedTuple):
    """Experts or another tensor to compare."""

    name: str
    is_set: bool
    nbytes: int


def _compare(
    sides: tuple[ComparedCheckpoint, ComparedCheckpoint],
    batch: tuple[int, tuple[_Compared, ...]],
) -> Comparison:
    result = Comparison()
    for name, is_set, _ in batch[1]:
        (_compare_set if is_set else _compare_tensor)(*sides, name, result)
    return result


def _compare_set(
    a: ComparedCheckpoint, b: ComparedCheckpoint, prefix: str, result: Comparison
) -> None:
    grouped = [
        replace(side.sets[prefix], layout=GROUPED).shapes() if prefix in side.sets else {}
        for side in (a, b)
    ]
    if not (grouped[0] and grouped[1]):
        what, keys = ("only in A", grouped[0]) if grouped[0] else ("only in B", grouped[1])
        result.differences += [Difference(name=key, what=what) for key in keys]
        return
    if grouped[0] != grouped[1]:
        detail = " against ".join(f"{list(shapes.values())}" for shapes in grouped)
        result.differences.append(Difference(name=prefix, what="shape", detail=detail))
        return
    found: dict[str, list[Difference]] = {key: [] for key in grouped[0]}
    sides = [(side.view, side.sets[prefix]) for side in (a, b)]
    for experts in ranges_of_experts(sides, a.nbytes(prefix)):
        left, right = a.read(prefix, experts), b.read(prefix, experts)
        for key, differences in found.items():
            result.nbytes += left[key].nbytes
            if left[key].dtype != right[key].dtype:
                differences[:] = [_other(key, "dtype", left[key].dtype, right[key].dtype)]
                continue
            for expert, values, other in zip(experts, left[key], right[key], strict=True):
                if one := compare_values(key, values, other):
                    differences.append(replace(one, expert=expert))
    result.tensors += len(found)
    result.differences += [one for differences in found.values() for one in differences]


def _compare_tensor(
    a: ComparedCheckpoint, b: ComparedCheckpoint, key: str, result: Comparison
) -> None:
    left, right = (side.view.tensors.get(key) for side in (a, b))
    if left is None or right is None:
        what = "only in B" if left is None else "only in A"
        result.differences.append(Difference(name=key, what=what))
        return
    if left.shape != right.shape:
        shapes = list(left.shape), list(right.shape)
        result.differences.append(_other(key, "shape", *shapes))
        return
    result.tensors += 1
    result.nbytes += left.nbytes
    if left.dtype != right.dtype:
        result.differences.append(_other(key, "dtype", left.dtype, right.dtype))
        return
    found: list[Difference] = []
    for rows in ranges_of_rows([a.view, b.view], key, left.nbytes):
        if one := compare_values(key, a.view.read(key, rows), b.view.read(key, rows)):
            first = (one.first[0] + rows.start, *one.first[1:]) if rows else one.first
            found.append(replace(one, first=first))
    if found:
        whole = replace(
            found[0],
            differing=sum(one.differing for one in found),
            elements=prod(left.shape),
            largest=max((one.largest for one in found if one.largest is not None), default=None),
        )
        result.differences.append(whole)


def _other(key: str, what: str, left: object, right: object) -> Difference:
    return Difference(name=key, what=what, detail=f"{left} against {right}")


def compare_values(name: str, left: Tensor, right: Tensor) -> Difference | None:
    """Compare two tensors bitwise; return None if they are equal.

    Args:
        name: name of the tensor, for the result.
        left: tensor of any shape and dtype.
        right: tensor of the same shape and dtype.
    """
    if left.is_complex():
        left, right = torch.view_as_real(left), torch.view_as_real(right)
    bits = _BITS[left.dtype.itemsize]
    left_bits, right_bits = left.contiguous().view(bits), right.contiguous().view(bits)
    if torch.equal(left_bits, right_bits):
        return None
    differs = left_bits != right_bits
    first = int(differs.flatten().to(torch.uint8).argmax())
    index = torch.unravel_index(torch.tensor(first, dtype=torch.int64, device="cpu"), differs.shape)
    return Difference(
        name=name,
        what="values",
        differing=int(differs.sum()),
        elements=prod(left.shape),
        first=tuple(int(part) for part in index),
        largest=_largest_gap(left[differs], right[differs]),
    )


def _largest_gap(left: Tensor, right: Tensor) -> float | None:
    """Return the largest absolute difference of values that are not NaN; None if there are none."""
    if not left.is_floating_point() and left.dtype != torch.bool:  # doubles hold 53 bits
        some, others = left.numpy(), right.numpy()
        gaps = np.maximum(some, others) - np.minimum(some, others)
        return int(gaps.view(f"u{gaps.itemsize}").max())  # unsigned: differences may wrap around
    gaps_of_floats = (left.double() - right.double()).abs()
    gaps_of_floats = gaps_of_floats[~gaps_of_floats.isnan()]
    return float(gaps_of_floats.max()) if gaps_of_floats.numel() else None


def _flat_states_differ(a: LayerView, b: LayerView) -> bool:
    """Return whether the sides store states in different buckets, or only one of them in buckets.

    False if ``a`` or ``b`` has no states. Dtypes may differ, since they do not affect the layout.
    """
    flat = [
        {key: info.shape for key, info in view.tensors.items() if FLAT_STATES in key}
        for view in (a, b)
    ]
    return flat[0] != flat[1] and all(any(map(is_state, view.tensors)) for view in (a, b))
