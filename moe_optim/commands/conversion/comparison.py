"""Compares two checkpoints element by element, across expert layouts."""

from dataclasses import dataclass, field, replace
from math import prod

import numpy as np
import torch
from torch import Tensor

from moe_optim.checkpoint.files.reader import FLAT_STATES, is_state
from moe_optim.commands.conversion.expert_finding import (
    check_row_order,
    find_experts,
    is_quantized,
    known_interleave,
    without_experts,
)
from moe_optim.commands.conversion.file_plan import BytesDone, one_thread
from moe_optim.commands.conversion.layer_view import LayerView
from moe_optim.experts.keys.conversion import convert_expert_set
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

    def read(self, prefix: str) -> dict[str, Tensor]:
        """Return the experts at ``prefix`` in layout ``grouped``, all gate rows before the up rows.

        CPU tensors by key: weights [E, 2F, H] and [E, H, F], biases [E, 2F] and [E, H], in the
        dtype of the checkpoint.
        """
        one = self.sets[prefix]
        tensors = {key: self.view.read(key) for key in one.keys}
        if one.layout == GROUPED and not self.interleave:
            return tensors
        return convert_expert_set(tensors, one, GROUPED, source_interleave=self.interleave or None)


Side = ComparedCheckpoint
"""Former name of :class:`ComparedCheckpoint`."""


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
    a: ComparedCheckpoint, b: ComparedCheckpoint, report: BytesDone
) -> Comparison:
    """Compare all tensors of two checkpoints, one layer of each in memory at a time.

    Args:
        a: checkpoint named A in differences.
        b: checkpoint named B.
        report: progress callback; receives the bytes of A compared since its last call.

    Raises:
        LayoutError: the interleaving of expert rows is ambiguous.
        StateError: a file cannot be read.
    """
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
    for prefix in dict.fromkeys([*a.sets, *b.sets]):
        _compare_set(a, b, prefix, result)
        report(a.view.nbytes(a.sets[prefix].keys) if prefix in a.sets else 0)
    keys = dict.fromkeys([*a.others, *b.others])
    if flat_states_differ(a.view, b.view):
        result.skipped = [key for key in keys if FLAT_STATES in key]
    if result.skipped:
        result.notes.append(
            f"Flat optimizer states, {len(result.skipped)} in all, were not compared: the two "
            "checkpoints lay them out differently. Save with --dist-ckpt-optim-fully-reshardable."
        )
    skipped = set(result.skipped)
    for key in keys:
        if key not in skipped:
            _compare_tensor(a, b, key, result)
        report(a.view.tensors[key].nbytes if key in a.view.tensors else 0)
    return result


def _compare_set(
    a: ComparedCheckpoint, b: ComparedCheckpoint, prefix: str, result: Comparison
) -> None:
    grouped = [
        replace(side.sets[prefix], layout=GROUPED).shapes() if prefix in side.sets else None
        for side in (a, b)
    ]
    if grouped[0] is None or grouped[1] is None:
        what, keys = ("only in B", grouped[1]) if grouped[0] is None else ("only in A", grouped[0])
        result.differences += [Difference(name=key, what=what) for key in keys or ()]
        return
    if grouped[0] != grouped[1]:
        detail = " against ".join(f"{list(found.values())}" for found in grouped if found)
        result.differences.append(Difference(name=prefix, what="shape", detail=detail))
        return
    left, right = a.read(prefix), b.read(prefix)
    for key in left:
        if _have_one_dtype(key, left[key], right[key], result):
            for expert in range(left[key].shape[0]):
                found = compare_values(key, left[key][expert], right[key][expert])
                if found:
                    result.differences.append(replace(found, expert=expert))


def _compare_tensor(
    a: ComparedCheckpoint, b: ComparedCheckpoint, key: str, result: Comparison
) -> None:
    infos = [side.view.tensors.get(key) for side in (a, b)]
    if infos[0] is None or infos[1] is None:
        what = "only in B" if infos[0] is None else "only in A"
        result.differences.append(Difference(name=key, what=what))
        return
    if infos[0].shape != infos[1].shape:
        detail = f"{list(infos[0].shape)} against {list(infos[1].shape)}"
        result.differences.append(Difference(name=key, what="shape", detail=detail))
        return
    left, right = a.view.read(key), b.view.read(key)
    if _have_one_dtype(key, left, right, result) and (found := compare_values(key, left, right)):
        result.differences.append(found)


def _have_one_dtype(key: str, left: Tensor, right: Tensor, result: Comparison) -> bool:
    """Count a compared tensor; record a difference in dtype."""
    result.tensors += 1
    result.nbytes += left.nbytes
    if left.dtype == right.dtype:
        return True
    detail = f"{left.dtype} against {right.dtype}"
    result.differences.append(Difference(name=key, what="dtype", detail=detail))
    return False


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


def flat_states_differ(a: LayerView, b: LayerView) -> bool:
    """Return whether the sides store states in different buckets, or only one of them in buckets.

    False if ``a`` or ``b`` has no states. Dtypes may differ, since they do not affect the layout.
    """
    flat = [
        {key: info.shape for key, info in view.tensors.items() if FLAT_STATES in key}
        for view in (a, b)
    ]
    return flat[0] != flat[1] and all(any(map(is_state, view.tensors)) for view in (a, b))
