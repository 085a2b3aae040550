"""Amaxes of experts under NVIDIA ModelOpt's keys and under ours, both ways, completely or not.

ModelOpt (0.47) keeps an amax in the buffer ``_amax`` of a quantizer, and a linear's quantizer of
weights is its child ``weight_quantizer``. Ours is a buffer of the linear itself.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from moe_optim.errors import ConfigError, LayoutError
from moe_optim.expert_keys.finding import expert_remainders, survey_expert_sets
from moe_optim.expert_keys.layouts import (
    CALIBRATED_AMAX,
    LINEARS,
    is_calibrated_amax,
    match_key,
)

ModelOptForm = Literal["grouped", "flat", "indexed", "sequential"]

_QUANTIZER = "weight_quantizer"
_ONE = f"{{linear}}.{_QUANTIZER}._amax"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Form:
    """One of the ways in which ModelOpt keeps the amaxes of a linear's experts."""

    template: str
    """Behind the container, with ``{linear}``, and ``{expert}`` where each has a key."""
    cut: Callable[[Tensor], list[Tensor]]
    """What amaxes [E, 1, 1] become, in the order of keys."""


_FORMS: Mapping[str, _Form] = {
    # one quantizer with axis 0 over a weight [E, R, C]
    "grouped": _Form(template=_ONE, cut=lambda amax: [amax.clone()]),
    "flat": _Form(template=_ONE, cut=lambda amax: [amax.flatten().clone()]),
    # GroupedQuantizer: a quantizer an expert over weights [R, C]
    "indexed": _Form(
        template=f"{{linear}}.{_QUANTIZER}.{{expert}}._amax",
        cut=lambda amax: [one.clone() for one in amax.flatten()],
    ),
    # SequentialMLP
    "sequential": _Form(
        template=f"local_experts.{{expert}}.{_ONE}",
        cut=lambda amax: [one.clone() for one in amax.flatten()],
    ),
}


def amaxes_to_modelopt(state: Mapping[str, Any], form: ModelOptForm = "indexed") -> dict[str, Any]:
    """Return a flat state dict with calibrated amaxes under ModelOpt's keys.

    They stand where the first one of their linear stood, newly allocated, the same bits. All other
    entries are the same objects, in their order. No rank communicates.

    Args:
        state: of any entries; neither it nor they are changed. Experts are those behind a component
            ``experts.``, or at the root.
        form: ``indexed`` for a ``GroupedQuantizer`` (a scalar an expert, as ModelOpt has Transformer
            Engine's linears), ``sequential`` for a quantizer in each of ``local_experts``,
            ``grouped`` [E, 1, 1] and ``flat`` [E] for one quantizer. The one amax of all experts
            becomes the scalar of one quantizer, with ``grouped`` or ``flat``.

    Raises:
        LayoutError: amaxes are of one linear alone, of weights that have none, of another number of
            experts, no magnitudes, there already under ModelOpt's keys, or without a place in this
            form. All faults at once, each by its key.
        ConfigError: there is no such form.
    """
    if form not in _FORMS:
        raise ConfigError(f"form: expected one of {', '.join(_FORMS)}, got {form!r}.")
    containers = _containers(state)
    faults = []
    renamed: dict[str, dict[str, Tensor]] = {}  # by our key
    for prefix, remainders in containers.items():
        ours = [remainder for remainder in remainders if is_calibrated_amax(remainder)]
        theirs = [remainder for remainder in remainders if _is_theirs(remainder)]
        faults += [
            f"{prefix}{remainder}: expected no amax of ModelOpt's beside ours"
            for remainder in theirs
        ]
        faults += _missing(prefix, {one.partition(".")[0] for one in ours}, CALIBRATED_AMAX)
        for remainder in ours:
            linear, key = remainder.partition(".")[0], prefix + remainder
            amax, found = _as_ours(state[key], key, _num_experts(state, prefix))
            is_one = amax is not None and amax.numel() == 1 and form in ("indexed", "sequential")
            if is_one and _num_experts(state, prefix) != 1:
                found = [f"{key}: one amax of all experts, which form {form} has no key for"]
            faults += found
            if amax is not None and not found:
                renamed[key] = _named(prefix, linear, _FORMS[form], amax)
    _raise(faults)
    return _replaced(state, renamed)


def amaxes_from_modelopt(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a flat state dict with the amaxes of experts' weights under our keys.

    They stand where the first one of their linear stood, newly allocated: [E, 1, 1] fp32, or
    [1, 1, 1] for one of all experts. All other entries are the same objects, in their order: those
    of other modules, and of quantizers of activations. No rank communicates.

    Args:
        state: of any entries; neither it nor they are changed. Each linear of experts may have any
            form of :func:`amaxes_to_modelopt`, in any dtype that holds magnitudes.

    Raises:
        LayoutError: experts are missing or numbered twice; amaxes are of one linear alone, of
            weights that have none, in two forms, of another number of experts, of channels or
            blocks, no magnitudes, or there already under our keys; or quantizers of weights hold
            something else. All faults at once, each by its key.
    """
    faults = []
    renamed: dict[str, dict[str, Tensor]] = {}
    dropped: set[str] = set()
    for prefix, remainders in _containers(state).items():
        ours = [remainder for remainder in remainders if is_calibrated_amax(remainder)]
        faults += [f"{prefix}{one}: expected no amax of ours beside ModelOpt's" for one in ours]
        theirs = {r for r in remainders if _is_theirs(r)}
        found = {linear: _forms_of(linear, theirs) for linear in LINEARS}
        known = {r for forms in found.values() for keys in forms.values() for r in keys.values()}
        faults += [
            f"{prefix}{one}: expected one amax an expert, got what no conversion knows"
            for one in sorted(theirs - known)
        ]
        there = {linear for linear, forms in found.items() if forms}
        faults += _missing(prefix, there, f"{_QUANTIZER}._amax")
        for linear in sorted(there):
            amax, new_faults = _gathered(state, prefix, found[linear])
            faults += new_faults
            if amax is not None and not new_faults:
                (keys,) = found[linear].values()
                whole = [prefix + remainder for remainder in keys.values()]
                renamed[whole[0]] = {f"{prefix}{linear}.{CALIBRATED_AMAX}": amax}
                dropped.update(whole[1:])
    _raise(faults)
    return _replaced(state, renamed, dropped)


def _containers(state: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return what lies behind each component ``experts.``, and at the root; amaxes or not.

    Only of containers that hold an amax of either, all of which must hold it where one does.
    """
    containers: dict[str, list[str]] = {}
    for key in state:
        parts = key.split(".")
        last = max((i + 1 for i, part in enumerate(parts[:-1]) if part == "experts"), default=0)
        prefix = "".join(f"{part}." for part in parts[:last])
        containers.setdefault(prefix, []).append(key.removeprefix(prefix))
    return {
        prefix: remainders
        for prefix, remainders in containers.items()
        if expert_remainders(remainders)
        or any(is_calibrated_amax(r) or _is_theirs(r) for r in remainders)
    }


def _is_theirs(remainder: str) -> bool:
    """Return whether a quantizer of an expert's weights holds it."""
    parts = remainder.split(".")
    at = 2 if parts[0] == "local_experts" else 0
    return len(parts) > at + 1 and parts[at] in LINEARS and parts[at + 1] == _QUANTIZER


def _missing(prefix: str, there: set[str], name: str) -> list[str]:
    return [
        f"{prefix}{linear}.{name}: missing, expected for every linear of experts"
        for linear in LINEARS
        if linear not in there
    ]


def _num_experts(state: Mapping[str, Any], prefix: str) -> int | None:
    """Return how many experts the weights of a container are of, None where they do not tell."""
    shapes = {
        key: value.shape if isinstance(value, Tensor) else None
        for key, value in state.items()
        if key.startswith(prefix) and expert_remainders([key.removeprefix(prefix)])
    }
    sets, _ = survey_expert_sets(shapes, prefixes=[prefix])
    return sets[0].num_experts if len(sets) == 1 else None


def _forms_of(linear: str, theirs: set[str]) -> dict[str, dict[int | None, str]]:
    """Return under which templates a linear has amaxes: by expert, None for one key."""
    found: dict[str, dict[int | None, str]] = {}
    for form in _FORMS.values():
        template = form.template.replace("{linear}", linear)
        for remainder in theirs:
            match = match_key(remainder, template)
            if match is not None:
                found.setdefault(template, {})[match[0]] = remainder
    return {name: dict(sorted(keys.items(), key=_order)) for name, keys in found.items()}


def _order(item: tuple[int | None, str]) -> int:
    return -1 if item[0] is None else item[0]


def _gathered(
    state: Mapping[str, Any], prefix: str, forms: dict[str, dict[int | None, str]]
) -> tuple[Tensor | None, list[str]]:
    """Return the amaxes of one linear, or what is wrong with them."""
    keys = [prefix + remainder for found in forms.values() for remainder in found.values()]
    if len(forms) > 1:
        return None, [f"{key}: expected one form of amaxes, got {len(forms)}" for key in keys]
    (found,) = forms.values()
    count = _num_experts(state, prefix)
    if None in found:
        return _as_ours(state[keys[0]], keys[0], count)
    size = count or max(int(index or 0) for index in found) + 1
    template, faults = next(iter(forms)), []
    for index in range(size):
        if index not in found:
            faults.append(f"{prefix}{template.format(expert=index)}: missing, of {size} experts")
    faults += [
        f"{prefix}{remainder}: expected experts 0 to {size - 1} only"
        for index, remainder in found.items()
        if index is not None and index >= size
    ]
    values = []
    for key in keys:
        value, new_faults = _as_ours(state[key], key, 1)
        faults += new_faults
        values += [] if value is None else [value]
    return (torch.cat(values), []) if not faults else (None, faults)


def _as_ours(value: Any, key: str, num_experts: int | None) -> tuple[Tensor | None, list[str]]:
    """Return a copy [E, 1, 1] or [1, 1, 1] fp32, or what is wrong with a value."""
    shape = tuple(value.shape) if isinstance(value, Tensor) else None
    if not isinstance(value, Tensor) or shape is None or not value.is_floating_point():
        return None, [f"{key}: expected floating-point amaxes, got {type(value).__name__}"]
    count = value.numel()
    wanted = "one value" if num_experts == 1 else f"{num_experts or 'E'} values, or one"
    fits = count == 1 or shape in ((count,), (count, 1, 1))
    fits |= num_experts is not None and shape == (num_experts, 1)
    if not count or not fits or (count != 1 and count != (num_experts or count)):
        return None, [f"{key}: expected {wanted}, as [E, 1, 1] or [E], got {list(shape)}"]
    amax = value.detach().to(torch.float32, copy=True).reshape(-1, 1, 1)
    if not (amax.isfinite() & (amax >= 0)).all():
        return None, [f"{key}: expected finite magnitudes, got {amax.flatten().tolist()}"]
    return amax, []


def _named(prefix: str, linear: str, form: _Form, amax: Tensor) -> dict[str, Tensor]:
    template = prefix + form.template.replace("{linear}", linear)
    values = form.cut(amax)
    if "{expert}" not in template:
        return {template: values[0].reshape(()) if amax.numel() == 1 else values[0]}
    return {template.format(expert=index): value for index, value in enumerate(values)}


def _replaced(
    state: Mapping[str, Any],
    renamed: Mapping[str, dict[str, Tensor]],
    dropped: set[str] | None = None,
) -> dict[str, Any]:
    """Return the state with other entries in the places of some, and without others."""
    result: dict[str, Any] = {}
    for key, value in state.items():
        if key in renamed:
            result |= renamed[key]
        elif key not in (dropped or ()):
            result[key] = value
    return result


def _raise(faults: list[str]) -> None:
    if faults:
        raise LayoutError(
            f"amaxes of experts: expected one for each expert of every linear, got {len(faults)} "
            "fault(s):\n" + "".join(f"  {fault}\n" for fault in faults) + "Nothing was converted. "
            "Change these entries."
        )
