"""Conversion of expert amaxes between NVIDIA ModelOpt's keys and ours.

ModelOpt (0.47) keeps an amax in the buffer ``_amax`` of a quantizer, and the quantizer of a
linear's weights is its child ``weight_quantizer``. Ours is a buffer of the linear itself. Amaxes of
inputs are in :mod:`moe_optim.calibration.modelopt_inputs`.
"""

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from moe_optim.calibration.calibrated_amax import are_magnitudes, as_buffer
from moe_optim.calibration.modelopt_inputs import InputAmaxes
from moe_optim.errors import ConfigError, LayoutError, listed
from moe_optim.experts.keys.finding import expert_remainders, survey_expert_sets
from moe_optim.experts.keys.layouts import CALIBRATED_AMAX, LINEARS, match_key

ModelOptForm = Literal["indexed", "numbered", "sequential", "grouped", "flat", "scalar"]

_QUANTIZER = "weight_quantizer"
_ONE_KEY = f"{{linear}}.{_QUANTIZER}._amax"
_MOST_NAMES = 20
"""Maximum number of names in a warning."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Form:
    template: str
    """Key after the container, with ``{linear}``, and ``{expert}`` if each has a key."""
    values: Callable[[Tensor], Sequence[Tensor]]
    """Function of amaxes [E, 1, 1] -> the values under these keys, in order."""


def _scalars(amax: Tensor) -> Sequence[Tensor]:
    return amax.flatten().unbind(0)


_FORMS: Mapping[str, _Form] = MappingProxyType(
    {
        # GroupedQuantizer: a quantizer per expert, as Transformer Engine's linears have since 0.47
        "indexed": _Form(template=f"{{linear}}.{_QUANTIZER}.{{expert}}._amax", values=_scalars),
        # earlier versions, with one name per quantizer
        "numbered": _Form(template=f"{{linear}}.{_QUANTIZER}_{{expert}}._amax", values=_scalars),
        # SequentialMLP
        "sequential": _Form(template=f"local_experts.{{expert}}.{_ONE_KEY}", values=_scalars),
        # one quantizer with axis 0 over a weight [E, R, C]
        "grouped": _Form(template=_ONE_KEY, values=lambda amax: [amax]),
        "flat": _Form(template=_ONE_KEY, values=lambda amax: [amax.flatten()]),
        # one quantizer with axis None over a rank's weight [E, R, C]
        "scalar": _Form(template=_ONE_KEY, values=lambda amax: [amax[0, 0, 0]]),
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Container:
    """Weights or amaxes of the experts of one layer in a state dict."""

    prefix: str
    """Prefix of all keys, through ``experts.``; empty at the root."""
    ours: Mapping[str, str]
    """Linear -> key of the amaxes of its weights."""
    theirs: Mapping[str, str]
    """Remainder -> key of every amax in a weight quantizer."""
    others: Sequence[str]
    """Keys of all other states of weight quantizers."""
    num_experts: int | None
    """Number of experts of the weights in the container; None without weights."""
    inputs: InputAmaxes
    """Amaxes of inputs."""


def amaxes_to_modelopt(state: Mapping[str, Any], form: ModelOptForm = "indexed") -> dict[str, Any]:
    """Return a flat state dict with calibrated amaxes under ModelOpt's keys.

    They replace our keys in place, newly allocated, fp32. All other entries are the same objects,
    in order. A warning names other states of weight quantizers, and expert linears without amaxes
    if others have some. No rank communicates.

    The amax of a linear's inputs becomes the scalar of its ``input_quantizer``, or, with
    ``sequential``, of that of every expert.

    Args:
        state: any entries; not modified. Experts are under a component ``experts.``, or at the
            root.
        form: ``indexed`` for a ``GroupedQuantizer``, one scalar per expert, as in ModelOpt for
            linears of Transformer Engine; ``numbered`` for quantizers ``weight_quantizer_N``;
            ``sequential`` for one quantizer per ``local_experts`` module; ``grouped`` [E, 1, 1] and
            ``flat`` [E] for one quantizer; ``scalar`` for one quantizer with axis None, whose
            experts must have equal amaxes. A single amax of all experts requires one of the last
            three, and becomes a scalar.

    Raises:
        LayoutError: there are expert weights but no amaxes; or amaxes have a wrong number of
            experts, are negative or non-finite, exist under ModelOpt's keys already, or do not fit
            the form. All faults at once, by key.
        ConfigError: no form has this name.
    """
    if form not in _FORMS:
        raise ConfigError(f"form: expected one of {', '.join(_FORMS)}, got {form!r}. Give one.")
    containers = list(_containers(state))
    given = {container.prefix: tuple(container.ours) for container in containers}
    faults, renamed = _missing(containers, given, CALIBRATED_AMAX), {}
    for container in containers:
        faults += [f"{key}: expected no amaxes but ours" for key in container.theirs.values()]
        for linear, key in container.ours.items():
            amax, new_faults = _read(state[key], key, container.num_experts)
            faults += new_faults
            if amax is None:
                continue
            template = container.prefix + _FORMS[form].template.replace("{linear}", linear)
            if "{expert}" in template and len(amax) == 1 and container.num_experts != 1:
                faults.append(
                    f"{key}: expected one value per expert for {template}, got one of all"
                )
                continue
            if form == "scalar" and (amax != amax[0]).any():
                faults.append(f"{key}: expected equal amaxes for {template}, got different ones")
            values = [amax[0, 0, 0]] if len(amax) == 1 else _FORMS[form].values(amax)
            renamed[key] = {
                template.format(expert=index): value.clone() for index, value in enumerate(values)
            }
        of_inputs, new_faults = container.inputs.to_modelopt(
            state, form, container.num_experts or _count_amaxes(state, container.ours.values())
        )
        renamed |= of_inputs
        faults += new_faults
    _raise(faults)
    _say_what_stays(containers, given)
    return _replaced(state, renamed)


def amaxes_from_modelopt(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a flat state dict with ModelOpt's amaxes of experts under our keys.

    They replace the first key of their linear, newly allocated: [E, 1, 1] fp32, or [1, 1, 1] for
    one of all experts. The amax of inputs, [1, 1, 1], is the largest of a linear's input
    quantizers; a ``SequentialMLP`` has one per expert. All other entries are the same objects, in
    order. A warning names other states of weight quantizers, such as a ``_global_amax``
    or an ``_extra_state``, and expert linears without amaxes if others have some. No rank
    communicates.

    Args:
        state: any entries; not modified. Each expert linear may have any form of
            :func:`amaxes_to_modelopt`, in any floating-point dtype.

    Raises:
        LayoutError: there are expert weights but no amaxes; or amaxes are incomplete, have two
            forms or an unknown one, have a wrong number of experts, channels or blocks, are
            negative or non-finite, or exist under our keys already. All faults at once, by key.
    """
    order = {key: place for place, key in enumerate(state)}
    containers, given = list(_containers(state)), dict[str, Sequence[str]]()
    faults, renamed, taken = [], {}, set[str]()
    for container in containers:
        faults += [f"{key}: expected no amaxes but ModelOpt's" for key in container.ours.values()]
        found = {linear: _by_template(container, linear) for linear in LINEARS}
        known = {
            key for forms in found.values() for keys in forms.values() for key in keys.values()
        }
        faults += [
            f"{key}: expected an amax of ModelOpt's forms ({', '.join(_FORMS)}), got one of none"
            for key in container.theirs.values()
            if key not in known
        ]
        there = [linear for linear, forms in found.items() if forms]
        given[container.prefix] = there
        for linear in there:
            amax, new_faults = _gather(state, container, found[linear])
            faults += new_faults
            if amax is not None:
                (keys,) = found[linear].values()
                first = min(keys.values(), key=order.__getitem__)
                renamed[first] = {f"{container.prefix}{linear}.{CALIBRATED_AMAX}": amax}
                taken.update(keys.values())
        of_inputs, new_faults = container.inputs.from_modelopt(state)
        renamed |= of_inputs
        faults += new_faults
        taken.update(key for keys in container.inputs.theirs.values() for key in keys)
    faults += _missing(containers, given, f"{_QUANTIZER}._amax")
    _raise(faults)
    _say_what_stays(containers, given)
    return _replaced(state, renamed, without=taken)


def _containers(state: Mapping[str, Any]) -> Iterator[_Container]:
    found: dict[str, dict[str, str]] = {}  # remainder -> key, by prefix
    for key in state:
        parts = key.split(".")
        end = max((i + 1 for i, part in enumerate(parts[:-1]) if part == "experts"), default=0)
        prefix = "".join(f"{part}." for part in parts[:end])
        found.setdefault(prefix, {})[key.removeprefix(prefix)] = key
    for prefix, keys in found.items():
        of_weights = {linear: keys.get(f"{linear}.{CALIBRATED_AMAX}") for linear in LINEARS}
        ours = {linear: key for linear, key in of_weights.items() if key is not None}
        inputs = InputAmaxes.of(prefix, keys)
        of_quantizers = {r: key for r, key in keys.items() if _is_of_quantizer(r)}
        theirs = {r: key for r, key in of_quantizers.items() if r.endswith("._amax")}
        weights = [keys[remainder] for remainder in expert_remainders(keys)]
        if ours or of_quantizers or weights or inputs.ours or inputs.theirs:
            yield _Container(
                prefix=prefix,
                ours=ours,
                theirs=theirs,
                others=[key for r, key in of_quantizers.items() if r not in theirs],
                num_experts=_count_experts({key: state[key] for key in weights}, prefix),
                inputs=inputs,
            )


def _is_of_quantizer(remainder: str) -> bool:
    parts = remainder.split(".")
    if parts[0] == "local_experts":
        parts = parts[2:]
    return len(parts) > 2 and parts[0] in LINEARS and parts[1].startswith(_QUANTIZER)


def _count_experts(weights: Mapping[str, Any], prefix: str) -> int | None:
    shapes = {k: v.shape if isinstance(v, Tensor) else None for k, v in weights.items()}
    sets, _ = survey_expert_sets(shapes, prefixes=[prefix])
    return sets[0].num_experts if len(sets) == 1 else None


def _count_amaxes(state: Mapping[str, Any], keys: Iterable[str]) -> int | None:
    counts = {state[key].numel() for key in keys if isinstance(state[key], Tensor)} - {1}
    return counts.pop() if len(counts) == 1 else None


def _missing(
    containers: Sequence[_Container], given: Mapping[str, Sequence[str]], name: str
) -> list[str]:
    """Return the faults of a state in which no linear of any layer has amaxes."""
    if any(given.values()) or any(one.inputs.ours or one.inputs.theirs for one in containers):
        return []
    return [
        f"{container.prefix}{linear}.{name}: missing, expected of both linears of all experts"
        for container in containers
        for linear in LINEARS
    ]


def _say_what_stays(containers: Sequence[_Container], given: Mapping[str, Collection[str]]) -> None:
    said = []
    of_inputs = {one.prefix: one.inputs.ours or one.inputs.theirs for one in containers}
    for what, found in (("amaxes", given), ("input amaxes", of_inputs)):
        bare = [
            f"{container.prefix}{linear}"
            for container in containers
            for linear in LINEARS
            if linear not in found[container.prefix]
        ]
        if bare and any(found.values()):
            said.append(f"no {what} of {listed(bare, most=_MOST_NAMES)}")
    others = [key for container in containers for key in container.others]
    if others:
        stays = listed(others, most=_MOST_NAMES)
        said.append(f"{len(others)} other states of quantizers stay: {stays}")
    if said:
        warnings.warn(f"amaxes of experts: {'; '.join(said)}", stacklevel=3)


def _by_template(container: _Container, linear: str) -> dict[str, dict[int | None, str]]:
    """Return the keys of a linear's amaxes by template, then by expert (None for one key)."""
    found: dict[str, dict[int | None, str]] = {}
    for template in dict.fromkeys(form.template for form in _FORMS.values()):
        template = template.replace("{linear}", linear)
        for remainder, key in container.theirs.items():
            match = match_key(remainder, template)
            if match is not None:
                found.setdefault(template, {})[match[0]] = key
    return found


def _gather(
    state: Mapping[str, Any], container: _Container, found: dict[str, dict[int | None, str]]
) -> tuple[Tensor | None, list[str]]:
    if len(found) > 1:
        keys = [key for keys in found.values() for key in keys.values()]
        return None, [f"{key}: expected amaxes in one form, got also another" for key in keys]
    ((template, by_expert),) = found.items()
    if None in by_expert:
        return _read(state[by_expert[None]], by_expert[None], container.num_experts)
    last = max(index for index in by_expert if index is not None)
    size = container.num_experts or last + 1
    faults = [
        f"{container.prefix}{template.format(expert=index)}: missing, expected of {size} experts"
        for index in range(size)
        if index not in by_expert
    ]
    values = []
    for index, key in by_expert.items():
        if index is not None and index >= size:
            faults.append(f"{key}: expected experts 0 to {size - 1} only")
        value, new_faults = _read(state[key], key, 1)
        faults += new_faults
        if value is not None and index is not None:
            values.append((index, value))
    if faults:
        return None, faults
    return torch.cat([value for _, value in sorted(values, key=lambda one: one[0])]), []


def _read(value: Any, key: str, num_experts: int | None) -> tuple[Tensor | None, list[str]]:
    """Return an fp32 copy [E, 1, 1] or [1, 1, 1] of one entry, or its faults.

    [E, 1] might be E channels: it is accepted only if weights confirm E experts.
    """
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return None, [f"{key}: expected floating-point amaxes, got something else"]
    shape, count = tuple(value.shape), num_experts or value.numel()
    shapes = [(count,), (count, 1, 1)] + ([(count, 1)] if num_experts else [])
    if not count or (value.numel() != 1 and shape not in shapes):
        size = "one value" if num_experts == 1 else f"[{num_experts or 'E'}, 1, 1], flat, or one"
        return None, [f"{key}: expected {size}, got {list(shape)}"]
    amax = as_buffer(value)
    if not are_magnitudes(amax):
        return None, [f"{key}: expected finite magnitudes, got {amax.flatten().tolist()}"]
    return amax, []


def _replaced(
    state: Mapping[str, Any],
    renamed: Mapping[str, Mapping[str, Tensor]],
    *,
    without: Collection[str] = (),
) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in state.items():
        if key in renamed:
            result |= renamed[key]
        elif key not in without:
            result[key] = value
    return result


def _raise(faults: Sequence[str]) -> None:
    if faults:
        raise LayoutError(
            f"amaxes of experts: expected a value for each expert, got {len(faults)} fault(s):\n"
            + "".join(f"  {fault}\n" for fault in faults)
            + "Nothing was converted. Change these entries."
        )
