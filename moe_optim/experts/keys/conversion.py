"""Conversion of the experts of a state dict between key layouts, element by element."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_optim.experts.keys.finding import refuse_keys, shape_faults, survey_expert_sets
from moe_optim.experts.keys.layouts import ExpertSet, KeyLayout, Projection, get_layout

_Piece = tuple[int, Projection, bool]
"""Expert, projection, and whether it is the bias."""


@torch.no_grad()
def convert_expert_set(
    tensors: Mapping[str, Any],
    source: ExpertSet,
    to: KeyLayout,
    *,
    source_interleave: int | None = None,
    target_interleave: int | None = None,
    experts: range | None = None,
) -> dict[str, Tensor]:
    """Return the experts of a set under the keys of another layout, with the same prefix.

    The reverse conversion is bit-exact. Results are contiguous copies in the shapes of the layout,
    with the dtype and device of the source (``meta`` too); extra states are dropped. No rank
    communicates.

    Args:
        tensors: entries of the set by key, in the shapes of its layout, any dtype; others are
            ignored.
        source: set from :func:`~moe_optim.experts.keys.finding.find_expert_sets`.
        to: layout of the result.
        source_interleave: number of gate rows that alternate with as many up rows, in weights and
            biases; None if all gate rows come first.
        target_interleave: interleaving of the result.
        experts: experts to convert, renumbered from 0; None for all.

    Raises:
        LayoutError: entries do not match the set, or differ in dtype or device; the layout has no
            biases or cannot interleave; or ``experts`` is out of range.
    """
    experts = range(source.num_experts) if experts is None else experts
    target = replace(source, layout=to, num_experts=len(experts))
    refuse_keys(_faults(tensors, source, to, experts, source_interleave, target_interleave))
    like: Tensor = tensors[source.keys[0]]
    results = {
        key: torch.empty(shape, dtype=like.dtype, device=like.device)
        for key, shape in target.shapes().items()
    }
    given = _pieces(tensors, source, source_interleave)
    for piece, place in _pieces(results, target, target_interleave).items():
        expert, projection, is_bias = piece
        place.copy_(given[experts[expert], projection, is_bias].reshape(place.shape))
    return results


def convert_state_dict(
    state: Mapping[str, Any],
    to: KeyLayout | str,
    *,
    source_interleave: int | None = None,
    target_interleave: int | None = None,
    layouts: Sequence[KeyLayout] | None = None,
    num_experts: int | None = None,
    prefixes: Collection[str] | None = None,
) -> dict[str, Any]:
    """Return a flat state dict with the experts of every layer in one layout.

    Converted experts replace the first key of their layer, see :func:`convert_expert_set`. All
    other entries are the same objects, in order.

    Args:
        state: state dict with any entries; not modified.
        to: layout of the result, or its name: ``grouped``, ``indexed``, ``sequential``, ``legacy``,
            ``hf``, ``hf_transposed`` or ``hf_per_expert``.
        source_interleave: number of gate rows that alternate with as many up rows, in every layer.
        target_interleave: interleaving of the result.
        layouts: layouts to search for; None for all named ones.
        num_experts: number of experts per layer, required for ``legacy``.
        prefixes: containers to convert, all of which must have experts; None for any.

    Raises:
        LayoutError: faults of :func:`~moe_optim.experts.keys.finding.find_expert_sets` and of
            :func:`convert_expert_set`, of all layers at once.
        ConfigError: no layout has this name.
    """
    to = get_layout(to) if isinstance(to, str) else to
    sets, faults = survey_expert_sets(
        {key: value.shape if isinstance(value, Tensor) else None for key, value in state.items()},
        layouts=layouts,
        num_experts=num_experts,
        prefixes=prefixes,
    )
    for source in sets:
        experts = range(source.num_experts)
        faults += _faults(state, source, to, experts, source_interleave, target_interleave)
    refuse_keys(faults)
    set_of = {key: source for source in sets for key in (*source.keys, *source.extra_states)}
    result: dict[str, Any] = {}
    done = set()
    for key, value in state.items():
        if key not in set_of:
            result[key] = value
        elif (source := set_of[key]).prefix not in done:
            done.add(source.prefix)
            result |= convert_expert_set(
                state,
                source,
                to,
                source_interleave=source_interleave,
                target_interleave=target_interleave,
            )
    return result


def _pieces(
    tensors: Mapping[str, Tensor], expert_set: ExpertSet, interleave: int | None
) -> dict[_Piece, Tensor]:
    """Return every projection of every expert as blocks of its rows, [blocks, rows, ...].

    They are views of contiguous tensors, so writing to them fills a set.
    """
    pieces: dict[_Piece, Tensor] = {}
    for pattern, index, key in expert_set.entries():
        values = tensors[key].reshape(expert_set.sizes(pattern.axes))
        values = values.permute(pattern.canonical_order)
        count = len(pattern.projections)
        for expert, rows in enumerate(values) if index is None else [(index, values)]:
            alternating = interleave if interleave and count == 2 else rows.shape[0] // count
            blocks = rows.unflatten(0, (-1, count, alternating))
            for place, projection in enumerate(pattern.projections):
                pieces[expert, projection, pattern.is_bias] = blocks[:, place]
    return pieces


def _faults(
    tensors: Mapping[str, Any],
    source: ExpertSet,
    to: KeyLayout,
    experts: range,
    source_interleave: int | None,
    target_interleave: int | None,
) -> list[str]:
    given = {key: tensors[key] for key in source.keys if key in tensors}
    shapes = {k: tuple(v.shape) if isinstance(v, Tensor) else None for k, v in given.items()}
    faults = shape_faults(source, shapes)
    kinds = {k: (str(v.dtype), str(v.device)) for k, v in given.items() if isinstance(v, Tensor)}
    if len(set(kinds.values())) > 1:
        most_common = Counter(kinds.values()).most_common(1)[0][0]
        reference = next(key for key, kind in kinds.items() if kind == most_common)
        faults += [
            f"{key}: expected {' on '.join(most_common)} as {reference}, got {' on '.join(kind)}"
            for key, kind in kinds.items()
            if kind != most_common
        ]
    if source.has_bias and not to.holds_biases:
        biases = (key for pattern, _, key in source.entries() if pattern.is_bias)
        faults += [
            f"{key}: expected no biases, which layout {to.name} cannot hold" for key in biases
        ]
    last = source.num_experts
    if experts.step != 1 or not 0 <= experts.start < experts.stop <= last:
        faults.append(f"{source.prefix}: expected some of experts 0 to {last - 1}, got {experts}")
    target = replace(source, layout=to)
    return [
        *faults,
        *interleave_faults(source, source_interleave),
        *interleave_faults(target, target_interleave),
    ]


def interleave_faults(expert_set: ExpertSet, interleave: int | None) -> list[str]:
    """Return why gate and up rows cannot alternate by ``interleave``."""
    if interleave is None:
        return []
    name, ffn = expert_set.layout.name, expert_set.ffn
    if not expert_set.layout.can_interleave:
        return [
            f"{expert_set.prefix}: layout {name} stores gate and up separately, got interleaving"
        ]
    if interleave < 1 or ffn % interleave:
        return [
            f"{expert_set.prefix}: expected blocks of rows that divide {ffn}, the width of its "
            f"experts, got interleaving by {interleave}"
        ]
    return []
