"""Conversion of expert amaxes between NVIDIA ModelOpt's keys and ours.

ModelOpt (0.47) keeps an amax in the buffer ``_amax`` of a quantizer; quantizers are the children
``weight_quantizer`` and ``input_quantizer`` of a linear. Ours are buffers of the linear itself.
Inputs have one quantizer of a grouped linear, or one in each expert of a ``SequentialMLP``, with
the same value after its synchronization.
"""

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from moe_optim.calibration.calibrated_amax import are_magnitudes, as_buffer
from moe_optim.errors import ConfigError, listed
from moe_optim.experts.keys.finding import (
    container_of,
    expert_remainders,
    refuse_conversion,
    survey_expert_sets,
)
from moe_optim.experts.keys.layouts import (
    CALIBRATED_AMAX,
    CALIBRATED_INPUT_AMAX,
    LINEARS,
    match_key,
)

ModelOptForm = Literal["indexed", "numbered", "sequential", "grouped", "flat", "scalar"]

_ONE_KEY = "{linear}.weight_quantizer._amax"
_FORMS: Mapping[str, str] = {
    # GroupedQuantizer: a quantizer per expert, as Transformer Engine's linears have since 0.47
    "indexed": "{linear}.weight_quantizer.{expert}._amax",
    # earlier versions, with one name per quantizer
    "numbered": "{linear}.weight_quantizer_{expert}._amax",
    # SequentialMLP
    "sequential": f"local_experts.{{expert}}.{_ONE_KEY}",
    # one quantizer with axis 0 over a weight [E, R, C]
    "grouped": _ONE_KEY,
    "flat": _ONE_KEY,
    # one quantizer with axis None over a rank's weight [E, R, C]
    "scalar": _ONE_KEY,
}
"""Keys of the amaxes of weights after the container."""
_INPUTS = "{linear}.input_quantizer._amax"
_SEQUENTIAL_INPUTS = f"local_experts.{{expert}}.{_INPUTS}"
_OF_QUANTIZER = re.compile(r"(local_experts\.[^.]*\.)?linear_fc[12]\.weight_quantizer[^.]*\..*")
_MOST_NAMES = 20  # maximum number of names in a warning


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layer:
    prefix: str  # prefix of all keys, through experts.; empty at the root
    num_experts: int | None  # number of experts of the weights; None without weights
    weights: Mapping[str, str]  # linear -> our key of the amaxes of its weights
    inputs: Mapping[str, str]  # linear -> our key of the amax of its inputs
    their_weights: Mapping[str, str]  # remainder -> key of every amax in a weight quantizer
    their_inputs: Mapping[str, Sequence[str]]
    """Linear -> ModelOpt's keys of amaxes of its inputs, in any form."""
    others: Sequence[str]  # keys of all other states of weight quantizers


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
    layers, faults = _survey(state)
    renamed: dict[str, dict[str, Tensor]] = {}
    for layer in layers:
        faults += [f"{key}: expected no amaxes but ours" for key in layer.their_weights.values()]
        for linear, key in layer.weights.items():
            amax = _read(state[key], key, layer.num_experts, faults)
            if amax is None:
                continue
            template = layer.prefix + _FORMS[form].replace("{linear}", linear)
            is_single = len(amax) == 1
            if is_single and "{expert}" in template and layer.num_experts != 1:
                faults.append(
                    f"{key}: expected one value per expert for {template}, got one of all"
                )
            if form == "scalar" and (amax != amax[0]).any():
                faults.append(f"{key}: expected equal amaxes for {template}, got different ones")
            values: Sequence[Tensor] = amax.flatten().unbind(0)
            if is_single or form == "scalar":
                values = values[:1]
            elif form in ("grouped", "flat"):
                values = [amax if form == "grouped" else amax.flatten()]
            renamed[key] = _named(template, values)
        renamed |= _inputs_to_modelopt(state, layer, form, faults)
    given = {layer.prefix: tuple(layer.weights) for layer in layers}
    return _renamed(state, renamed, layers, given, CALIBRATED_AMAX, faults)


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
    layers, faults = _survey(state)
    given: dict[str, Sequence[str]] = {}
    renamed: dict[str, dict[str, Tensor]] = {}
    for layer in layers:
        faults += [f"{key}: expected no amaxes but ModelOpt's" for key in layer.weights.values()]
        forms = {linear: found for linear in LINEARS if (found := _by_template(layer, linear))}
        given[layer.prefix] = tuple(forms)
        for linear, found in forms.items():
            first, *others = (key for keys in found.values() for key in keys.values())
            renamed |= {key: {} for key in others}
            amax = _gather(state, layer, found, faults)
            ours = f"{layer.prefix}{linear}.{CALIBRATED_AMAX}"
            renamed[first] = {} if amax is None else {ours: amax}
        faults += [
            f"{key}: expected an amax of ModelOpt's forms ({', '.join(_FORMS)}), got one of none"
            for key in layer.their_weights.values()
            if key not in renamed
        ]
        for linear, keys in layer.their_inputs.items():
            found_amaxes = (_read(state[key], key, 1, faults) for key in keys)
            amaxes = [one for one in found_amaxes if one is not None]
            renamed |= {key: {} for key in keys}
            if amaxes:
                name = f"{layer.prefix}{linear}.{CALIBRATED_INPUT_AMAX}"
                renamed[keys[0]] = {name: torch.stack(amaxes).amax(0)}
    return _renamed(state, renamed, layers, given, "weight_quantizer._amax", faults)


def _inputs_to_modelopt(
    state: Mapping[str, Any], layer: _Layer, form: str, faults: list[str]
) -> dict[str, dict[str, Tensor]]:
    """Return the entries that replace each of our keys of inputs; add all faults."""
    template, count = _INPUTS, 1
    if form == "sequential" and layer.inputs:
        amaxes = [state[key] for key in layer.weights.values()]
        counts = {one.numel() for one in amaxes if isinstance(one, Tensor)} - {1}
        template = _SEQUENTIAL_INPUTS
        count = layer.num_experts or (counts.pop() if len(counts) == 1 else 0)
        if not count:
            what = "expected weights or amaxes of each expert beside it"
            faults += [f"{key}: {what}" for key in layer.inputs.values()]
    renamed = {}
    for linear, key in layer.inputs.items():
        amax = _read(state[key], key, 1, faults)
        if amax is not None:
            name = layer.prefix + template.replace("{linear}", linear)
            renamed[key] = _named(name, [amax[0, 0, 0]] * count)
    return renamed


def _named(template: str, values: Sequence[Tensor]) -> dict[str, Tensor]:
    return {template.format(expert=index): one.clone() for index, one in enumerate(values)}


def _survey(state: Mapping[str, Any]) -> tuple[list[_Layer], list[str]]:
    """Return all layers with experts, and the faults of inputs that both sides have."""
    by_prefix: dict[str, dict[str, str]] = {}  # prefix -> remainder -> key
    for key in state:
        prefix = container_of(key)
        by_prefix.setdefault(prefix, {})[key.removeprefix(prefix)] = key
    layers, faults = [], []
    for prefix, keys in by_prefix.items():
        ours, inputs = (
            {linear: keys[name] for linear in LINEARS if (name := f"{linear}.{buffer}") in keys}
            for buffer in (CALIBRATED_AMAX, CALIBRATED_INPUT_AMAX)
        )
        their_inputs = {
            linear: of_linear
            for linear in LINEARS
            if (of_linear := [key for r, key in keys.items() if _is_input(r, linear)])
        }
        faults += [
            f"{key}: expected one amax, got also {their_inputs[linear][0]}"
            for linear, key in inputs.items()
            if linear in their_inputs
        ]
        theirs = {r: key for r, key in keys.items() if _OF_QUANTIZER.fullmatch(r)}
        weights = {keys[r]: state[keys[r]] for r in expert_remainders(keys)}
        if not (ours or inputs or theirs or their_inputs or weights):
            continue
        shapes = {k: v.shape if isinstance(v, Tensor) else None for k, v in weights.items()}
        sets, _ = survey_expert_sets(shapes, prefixes=[prefix])
        layers.append(
            _Layer(
                prefix=prefix,
                num_experts=sets[0].num_experts if len(sets) == 1 else None,
                weights=ours,
                inputs=inputs,
                their_weights={r: k for r, k in theirs.items() if r.endswith("._amax")},
                their_inputs=their_inputs,
                others=[k for r, k in theirs.items() if not r.endswith("._amax")],
            )
        )
    return layers, faults


def _is_input(remainder: str, linear: str) -> bool:
    templates = (one.replace("{linear}", linear) for one in (_INPUTS, _SEQUENTIAL_INPUTS))
    return any(match_key(remainder, template) for template in templates)


def _renamed(
    state: Mapping[str, Any],
    renamed: Mapping[str, Mapping[str, Tensor]],
    layers: Sequence[_Layer],
    given: Mapping[str, Sequence[str]],
    name: str,
    faults: list[str],
) -> dict[str, Any]:
    """Return the state with entries replaced; raise all faults, and warn of what stays.

    ``given`` are the linears with amaxes of weights by prefix, ``name`` is that of a missing one.
    """
    of_inputs = {layer.prefix: layer.inputs or layer.their_inputs for layer in layers}
    linears = [(layer.prefix, linear) for layer in layers for linear in LINEARS]
    if not any(given.values()) and not any(of_inputs.values()):
        what = f"{name}: missing, expected of both linears of all experts"
        faults += [f"{prefix}{linear}.{what}" for prefix, linear in linears]
    refuse_conversion("amaxes of experts: expected a value for each expert", faults)
    said = []
    for what, found in (("amaxes", given), ("input amaxes", of_inputs)):
        bare = [prefix + linear for prefix, linear in linears if linear not in found[prefix]]
        if bare and any(found.values()):
            said.append(f"no {what} of {listed(bare, most=_MOST_NAMES)}")
    if others := [key for layer in layers for key in layer.others]:
        stays = listed(others, most=_MOST_NAMES)
        said.append(f"{len(others)} other states of quantizers stay: {stays}")
    if said:
        warnings.warn(f"amaxes of experts: {'; '.join(said)}", stacklevel=3)
    result: dict[str, Any] = {}
    for key, value in state.items():
        result |= renamed.get(key, {key: value})
    return result


def _by_template(layer: _Layer, linear: str) -> dict[str, dict[int | None, str]]:
    """Return the keys of a linear's amaxes by template, then by expert (None for one key)."""
    found: dict[str, dict[int | None, str]] = {}
    for template in dict.fromkeys(_FORMS.values()):
        template = template.replace("{linear}", linear)
        for remainder, key in layer.their_weights.items():
            if (match := match_key(remainder, template)) is not None:
                found.setdefault(template, {})[match[0]] = key
    return found


def _gather(
    state: Mapping[str, Any],
    layer: _Layer,
    found: Mapping[str, Mapping[int | None, str]],
    faults: list[str],
) -> Tensor | None:
    if len(found) > 1:
        keys = [key for keys in found.values() for key in keys.values()]
        faults += [f"{key}: expected amaxes in one form, got also another" for key in keys]
        return None
    ((template, by_expert),) = found.items()
    if None in by_expert:
        return _read(state[by_expert[None]], by_expert[None], layer.num_experts, faults)
    keys_of = {index: key for index, key in by_expert.items() if index is not None}
    size = layer.num_experts or max(keys_of) + 1
    new_faults = [
        f"{layer.prefix}{template.format(expert=index)}: missing, expected of {size} experts"
        for index in range(size)
        if index not in keys_of
    ]
    new_faults += [
        f"{key}: expected experts 0 to {size - 1} only"
        for index, key in keys_of.items()
        if index >= size
    ]
    amaxes = [_read(state[key], key, 1, new_faults) for _, key in sorted(keys_of.items())]
    faults += new_faults
    return None if new_faults else torch.cat([one for one in amaxes if one is not None])


def _read(value: Any, key: str, num_experts: int | None, faults: list[str]) -> Tensor | None:
    """Return an fp32 copy [E, 1, 1] or [1, 1, 1] of one entry, or None and its fault.

    [E, 1] might be E channels: it is accepted only if weights confirm E experts.
    """
    if not isinstance(value, Tensor) or not value.is_floating_point():
        faults.append(f"{key}: expected floating-point amaxes, got something else")
        return None
    shape, count = tuple(value.shape), num_experts or value.numel()
    shapes = [(count,), (count, 1, 1)] + ([(count, 1)] if num_experts else [])
    if not count or (value.numel() != 1 and shape not in shapes):
        size = "one value" if num_experts == 1 else f"[{num_experts or 'E'}, 1, 1], flat, or one"
        faults.append(f"{key}: expected {size}, got {list(shape)}")
        return None
    amax = as_buffer(value)
    if not are_magnitudes(amax):
        faults.append(f"{key}: expected finite magnitudes, got {amax.flatten().tolist()}")
        return None
    return amax
