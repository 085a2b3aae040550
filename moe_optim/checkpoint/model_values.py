"""Finds the values of all parameters in a model state dict, for masters."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from moe_optim.calibration.linears import grouped_linears, members_of
from moe_optim.errors import LayoutError, listed
from moe_optim.experts.keys.finding import refuse_keys
from moe_optim.experts.keys.layouts import match_key
from moe_optim.experts.loading import expert_values_for_chunks
from moe_optim.weights.names import unwrapped_name
from moe_optim.weights.te.fields import plain_values

_KINDS = ("weight", "bias")

_Keys = dict[int | None, list[str]]
"""Keys of one kind of a linear by expert index; None: one key for all experts."""


def model_values_for(
    model_chunks: Sequence[torch.nn.Module], state_dict: Mapping[str, Any]
) -> dict[torch.nn.Parameter, Tensor]:
    """Return the value of every parameter of the chunks of an optimizer. No rank communicates.

    ``state_dict`` is the argument of ``reload_model_params``: the state of one chunk, or those of
    several under ``model``, ``model0`` and so on; not modified. Portable experts may have any
    layout, those of Transformer Engine linears one entry or one per expert. LayoutError lists all
    parameters that are missing, duplicated or of another shape.
    """
    state = expert_values_for_chunks(model_chunks, state_dict)
    form = next((form for form in ("model", "model_") if f"{form}0" in state), None)
    values: dict[torch.nn.Parameter, Tensor] = {}
    faults: list[str] = []
    for index, chunk in enumerate(model_chunks):
        of_chunk = state[f"{form}{index}"] if form else state.get("model", state)
        found = dict(of_chunk)
        _regroup_experts(found, chunk)
        DistributedOptimizer._synthesize_state_dict_params_for_model(found, chunk)
        by_name: dict[str, list[str]] = {}
        for key in found:
            by_name.setdefault(unwrapped_name(key), []).append(key)
        for name, param in chunk.named_parameters():
            keys = by_name.get(unwrapped_name(name), [])
            if len(keys) != 1:
                faults.append(f"{unwrapped_name(name)} is there {len(keys)} times")
            elif found[keys[0]].shape != param.shape:
                shapes = f"{list(found[keys[0]].shape)}, expected {list(param.shape)}"
                faults.append(f"{keys[0]} is {shapes}")
            else:
                values[param] = found[keys[0]]
    if faults:
        raise LayoutError(
            "reload_model_params: state_dict: expected every parameter of the model once, got: "
            f"{listed(faults, '; ')}. Give the state of the whole model."
        )
    return values


def _regroup_experts(state: dict[str, Any], chunk: torch.nn.Module) -> None:
    """Stack or split the experts in ``state``, in place, to match the Transformer Engine linears.

    Megatron always saves ``weight0`` and so on, which a model with a single grouped parameter does
    not find. LayoutError if experts are missing, left over, duplicated or of another shape.
    """
    given = _keys_by_parameter(state)
    faults: list[str] = []
    for module_name, linear in grouped_linears(chunk):
        own = {name: param.shape for name, param in linear.named_parameters(recurse=False)}
        for kind in _KINDS:
            name = ".".join(filter(None, (unwrapped_name(module_name), kind)))
            keys, is_one = given.get(name, {}), kind in own
            if not keys or not (is_one or f"{kind}0" in own):
                continue
            shape = tuple(own[kind][1:] if is_one else own[f"{kind}0"])
            if (fault := _fault(state, name, keys, linear.num_gemms, shape)) is not None:
                faults.append(fault)
            if fault is not None or is_one == (None in keys):
                continue
            if is_one:
                parts = [state.pop(keys[expert][0]) for expert in range(linear.num_gemms)]
                state[name] = torch.stack([plain_values(part) for part in parts])
            else:
                for expert, part in enumerate(members_of(state.pop(keys[None][0]))):
                    state[f"{name}{expert}"] = plain_values(part)
    refuse_keys(faults)


def _keys_by_parameter(state: Mapping[str, Any]) -> dict[str, _Keys]:
    found: dict[str, _Keys] = {}
    for key in state:
        path, dot, last = unwrapped_name(key).rpartition(".")
        for kind in _KINDS:
            match = match_key(last, kind) or match_key(last, f"{kind}{{expert}}")
            if match is not None:
                found.setdefault(path + dot + kind, {}).setdefault(match[0], []).append(key)
    return found


def _fault(
    state: Mapping[str, Any], name: str, keys: _Keys, count: int, shape: tuple[int, ...]
) -> str | None:
    """Return why keys are not all experts of a linear, each once and of ``shape``."""
    got = {key: tuple(getattr(state[key], "shape", ())) for each in keys.values() for key in each}
    by_number = {number: got[key] for number, (key, *_) in keys.items()}
    is_once = len(got) == len(by_number)
    if is_once and by_number in ({None: (count, *shape)}, dict.fromkeys(range(count), shape)):
        return None
    return (
        f"{name}: expected {count} experts of {list(shape)}, in one entry or in one each, got "
        f"{', '.join(f'{key} {list(shape)}' for key, shape in got.items())}"
    )
