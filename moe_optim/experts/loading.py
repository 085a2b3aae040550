"""Loading local experts from a state dict of local or all experts, in any layout."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_optim.calibration.calibrated_amax import local_amaxes
from moe_optim.errors import LayoutError
from moe_optim.experts.grouped_linear import GroupedLinear
from moe_optim.experts.keys.conversion import convert_expert_set
from moe_optim.experts.keys.finding import expert_remainders, refuse_keys, survey_expert_sets
from moe_optim.experts.keys.layouts import (
    CALIBRATED_AMAX,
    LINEARS,
    STORED_ALIKE,
    ExpertSet,
    KeyPattern,
    get_layout,
    is_extra_state,
)
from moe_optim.experts.sharding import grouped_linear_of
from moe_optim.weights.names import ADAPTER, BASE, base_of, is_wrapper, unwrapped_name
from moe_optim.weights.te.fields import plain_values


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalExperts:
    """Local experts of one layer, under the names of the model."""

    own: ExpertSet  # parameters of this rank: its experts, or its shard of each
    interleave: int | None
    """Number of gate rows that alternate with as many up rows; None without interleaving."""
    ep: tuple[int, int]  # rank in the expert-parallel group, and its size
    tp: tuple[int, int]  # rank in the expert-tensor-parallel group, and its size

    @classmethod
    def of(cls, experts: Any, prefix: str) -> "LocalExperts":
        """Describe portable experts whose names begin with ``prefix``."""
        fc1 = grouped_linear_of(experts, LINEARS[0])
        groups = experts.pg_collection
        num_experts, rows, hidden = fc1.shape
        own = ExpertSet(
            prefix=prefix,
            layout=get_layout(fc1.expert_layout),
            num_experts=num_experts,
            hidden=hidden,
            ffn=rows // 2,
            has_bias=bool(fc1.biases()),
        )
        return cls(
            own=own,
            interleave=experts.config.moe_mlp_glu_interleave_size,
            ep=(groups.ep.rank(), groups.ep.size()),
            tp=(groups.expt_tp.rank(), groups.expt_tp.size()),
        )

    @property
    def counts(self) -> tuple[int, int]:
        """Number of experts of this rank, and of all ranks."""
        return self.own.num_experts, self.own.num_experts * self.ep[1]

    @property
    def widths(self) -> tuple[int, int]:
        """Width F of this rank's shard of an expert, and of a whole expert."""
        return self.own.ffn, self.own.ffn * self.tp[1]

    def take_from(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Return the local experts, or this rank's shard of them, under its own names.

        ``entries`` are weights and biases of one container in any layout, with local or all
        experts, sharded or whole: interleaved as in the model, or with gate rows first under names
        of legacy experts and of Hugging Face's models. Those in the rank's layout are returned
        unchanged. LayoutError without one complete set, or for another number or size of experts.
        """
        shapes = {k: tuple(v.shape) if isinstance(v, Tensor) else None for k, v in entries.items()}
        if shapes == self.own.shapes():
            return dict(entries)
        source = self._find_source(shapes)
        first = self.ep[0] * self.own.num_experts if source.num_experts == self.counts[1] else 0
        values = convert_expert_set(
            {key: plain_values(value) for key, value in entries.items()},
            source,
            self.own.layout,
            source_interleave=self.interleave if source.layout.name in STORED_ALIKE else None,
            target_interleave=self.interleave,
            experts=range(first, first + self.own.num_experts),
        )
        if source.ffn == self.own.ffn:
            return dict(values)
        given = replace(self.own, has_bias=source.has_bias)
        return {key: self._cut(values[key], pattern) for pattern, _, key in given.entries()}

    def _find_source(self, shapes: Mapping[str, tuple[int, ...] | None]) -> ExpertSet:
        """Return the set of the entries; ``legacy`` shapes do not give the number of experts."""
        prefixes = [self.own.prefix]
        sets, _ = survey_expert_sets(shapes, prefixes=prefixes)
        if not sets:
            attempts = [
                survey_expert_sets(shapes, prefixes=prefixes, num_experts=count)
                for count in dict.fromkeys(self.counts)
            ]
            sets = [source for found, _ in attempts for source in found]
            refuse_keys([] if sets else min((faults for _, faults in attempts), key=len))
        fitting = [  # local or all experts, sharded or whole
            one
            for one in sets
            if one.num_experts in self.counts
            and one.ffn in self.widths
            and one.hidden == self.own.hidden
        ]
        if len(fitting) == 1:
            return fitting[0]
        given = [
            f"{one.num_experts} of [{one.hidden}, {one.ffn}] in {one.layout.name} layout"
            for one in fitting or sets
        ]
        numbers, widths, got = (
            " or ".join(dict.fromkeys(map(str, values)))
            for values in (self.counts, self.widths, given)
        )
        raise LayoutError(
            f"{self.own.prefix or 'experts'}: expected {numbers} experts, those of this rank or of "
            f"all {self.ep[1]} expert-parallel ranks, of hidden size and width "
            f"[{self.own.hidden}, {widths}], got {got}. Give the experts of this model, this "
            "rank's or all of them."
        )

    def _cut(self, values: Tensor, pattern: KeyPattern) -> Tensor:
        """Return this rank's shard of whole experts: rows of gate and up, columns of fc2."""
        for dim, axis in enumerate(pattern.axes):
            if axis in ("F", "2F"):
                rank, size = self.tp
                parts = values.chunk(len(pattern.projections), dim)
                return torch.cat([part.chunk(size, dim)[rank] for part in parts], dim)
        return values


def load_local_experts(experts: torch.nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
    """Replace the experts in a state dict by this rank's, under its parameter names, in place.

    For ``_load_from_state_dict``, which receives a copy of the caller's dict. Keys of no layout are
    kept, and missing keys stay missing, so that torch reports both. Keys of linears behind adapters
    may omit ``to_wrap``, as in checkpoints. No rank communicates. After a LayoutError, also of a
    wrapper that hides a linear, the dict is unchanged.
    """
    numbers = range(grouped_linear_of(experts, LINEARS[0]).shape[0])
    extra = {f"{prefix}{linear}._extra_state{number}" for linear in LINEARS for number in numbers}
    given = {
        key: value.shape if isinstance(value, Tensor) else None
        for key, value in state_dict.items()
        if key.startswith(prefix) and key not in extra
    }
    if given == {prefix + name: one.shape for name, one in experts.named_parameters()}:
        for key in extra & state_dict.keys():
            del state_dict[key]
        return  # nothing to find, convert or cut
    here = LocalExperts.of(experts, prefix)
    wrapped = [name for name in LINEARS if is_wrapper(experts.get_submodule(name))]
    state = dict(state_dict)
    for name in wrapped:
        _rename(state, f"{prefix}{name}.{BASE}.", f"{prefix}{name}.")
    remainders = expert_remainders(k.removeprefix(prefix) for k in state if k.startswith(prefix))
    taken = {prefix + r: state[prefix + r] for r in remainders if not is_extra_state(r)}
    local = here.take_from(taken) if taken else {}
    for remainder in remainders:
        del state[prefix + remainder]
    state.update(local)
    for linear in LINEARS:
        key = f"{prefix}{linear}.{CALIBRATED_AMAX}"
        if isinstance(state.get(key), Tensor):
            state[key] = local_amaxes(state[key], here.own.num_experts, here.ep)
    for name in wrapped:
        of_adapter = f"{prefix}{name}.{ADAPTER}."
        _rename(state, f"{prefix}{name}.", f"{prefix}{name}.{BASE}.", without=of_adapter)
    state_dict.clear()
    state_dict.update(state)


def _rename(state_dict: dict[str, Any], old: str, new: str, *, without: str | None = None) -> None:
    for key in [key for key in state_dict if key.startswith(old)]:
        if without is None or not key.startswith(without):
            state_dict[new + key.removeprefix(old)] = state_dict.pop(key)


def expert_values_for(
    model_chunk: torch.nn.Module, state_dict: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a chunk's state dict with the local experts under this rank's names.

    The flat state dict holds the experts of every layer in any layout. Full names are compared
    without wrappers (``module``, ``_orig_mod``) at any depth. Experts become ordinary tensors under
    the names of ``named_parameters()`` without a leading ``module.``; other entries are the same
    objects, and extra states of experts are dropped. No rank communicates. LayoutError if experts
    of a layer are missing or duplicated.
    """
    layers: dict[str, tuple[str, torch.nn.Module]] = {}
    for name, module in model_chunk.named_modules():
        linear = getattr(module, LINEARS[0], None)
        if isinstance(linear, torch.nn.Module) and isinstance(base_of(linear), GroupedLinear):
            name = f"{name}." if name else ""
            layers[unwrapped_name(name)] = name, module
    entries: dict[str, dict[str, str]] = {prefix: {} for prefix in layers}  # remainder -> key
    faults = []
    for key in state_dict:
        parts = unwrapped_name(key).split(".")
        splits = (("".join(f"{part}." for part in parts[:end]), end) for end in range(len(parts)))
        prefix, end = next(((one, end) for one, end in splits if one in layers), (None, 0))
        remainder = ".".join(parts[end:])
        if prefix is None or not expert_remainders([remainder]):
            continue
        other = entries[prefix].setdefault(remainder, key)
        if other != key:
            faults.append(f"{key}: expected one entry for {prefix}{remainder}, got also {other}")
    missing = [prefix for prefix, found in entries.items() if not found]
    faults += [f"{prefix or 'experts'}: expected its experts there, got none" for prefix in missing]
    refuse_keys(faults)
    local: dict[str, dict[str, Any]] = {}
    for prefix, found in entries.items():
        name, module = layers[prefix]
        name = re.sub(r"^(module\.)+", "", name)
        values = {
            name + remainder: plain_values(state_dict[key])
            for remainder, key in found.items()
            if not is_extra_state(remainder)
        }
        local[prefix] = LocalExperts.of(module, name).take_from(values)
    owner = {key: prefix for prefix, found in entries.items() for key in found.values()}
    result: dict[str, Any] = {}
    for key, value in state_dict.items():
        if key in owner:
            result |= local.pop(owner[key], {})
        else:
            result[key] = value
    return result


def expert_values_for_chunks(
    model_chunks: Sequence[torch.nn.Module], state_dict: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the state of all chunks with this rank's experts, in the form of ``state_dict``.

    That is the argument of ``reload_model_params``: the chunks under ``model0`` and so on (or
    ``model_0``), a single one under ``model``, or its state itself. LayoutError without some chunk.
    """
    form = next((form for form in ("model", "model_") if f"{form}0" in state_dict), None)
    keys = ["model"] if "model" in state_dict else []
    if form is not None:
        keys = [f"{form}{index}" for index in range(len(model_chunks))]
    missing = [key for key in keys if key not in state_dict]
    if missing or max(len(keys), 1) != len(model_chunks):
        raise LayoutError(
            f"state dict of the model: expected the states of {len(model_chunks)} chunks, got "
            f"{', '.join(key for key in keys if key in state_dict) or 'one'}. Give every chunk of "
            "this rank under model0, model1 and so on."
        )
    if not keys:
        return expert_values_for(model_chunks[0], state_dict)
    states = zip(keys, model_chunks, strict=True)
    return dict(state_dict) | {k: expert_values_for(chunk, state_dict[k]) for k, chunk in states}
