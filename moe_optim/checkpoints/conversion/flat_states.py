"""Flat states of stock Megatron, read by the names of their parameters.

Stock Megatron does not record what lies where in a bucket. The arguments saved with a checkpoint
say how parameters were shared and laid out, and sizes and edges of what is stored leave one order
of experts, seldom more. It is certain when every master, taken from where the order says, rounds to
the weight that was saved beside it. Else nothing is read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from moe_optim.checkpoints.conversion.flat_buffers import (
    bucket_key,
    flat_groups,
    lower_bits_of_masters,
    read_buffers,
)
from moe_optim.checkpoints.conversion.layer_view import LayerView, state_kind
from moe_optim.checkpoints.manifests.derived_manifest import Parameter, derive_manifests
from moe_optim.checkpoints.manifests.registration import registration_order
from moe_optim.checkpoints.manifests.state_manifest import Address, Read, StateManifest, listed
from moe_optim.checkpoints.stores.reader import (
    FLAT_STATES,
    FileFormat,
    Recorded,
    TensorInfo,
    is_state,
)
from moe_optim.checkpoints.stores.torch_dist import TorchDistReader
from moe_optim.errors import LayoutError
from moe_optim.expert_keys.finding import MAX_EXPERTS

_EXPERTS = ".mlp.experts."
_STATE = "optimizer.state."
_UNCUT = ("tensor", "pipeline", "virtual pipeline", "expert tensor")
REMEDY = (
    "Load it at its own sizes and save with --dist-ckpt-optim-fully-reshardable, or convert with "
    "--weights-only."
)


_Shown = tuple[str, int | None]
"""Key of a parameter, layers told apart, and number of an expert among all; None: of no expert."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Group:
    """A data-parallel group, whose ranks shared buckets."""

    name: str
    """What its keys begin with."""
    parameters: tuple[Parameter, ...]
    """As a model registers them, experts numbered from 0 in each group."""
    first_expert: int
    candidates: tuple[StateManifest, ...]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the states of a parameter, or of one expert of one, lie."""

    group: str
    dtype: str
    read: Read


class NamedStates:
    """A ``torch_dist`` checkpoint whose flat states are shown as if they had been saved by name.

    It is a :class:`~moe_optim.checkpoints.stores.reader.CheckpointReader`. States are called
    ``optimizer.state.exp_avg.`` and so on, with the name and the shape of the weight behind.
    """

    format: FileFormat = "torch_dist"

    def __init__(self, stored: TorchDistReader) -> None:
        """Find out what lies where: reads all masters and all weights, one at a time.

        Raises:
            LayoutError: it is not certain; says why, and what to do.
            StateError: a file is missing or damaged.
        """
        groups = _groups(stored)
        view = LayerView(stored, num_layers=_num_layers(stored))
        self._stored = stored
        self._places: dict[tuple[str, int | None], list[_Place]] = {}
        for (shown, _), place in sorted(_shown_places(stored, view, groups), key=_by_expert):
            stands = view.places[shown]
            self._places.setdefault((stands.name, stands.layer), []).append(place)
        self.path: Path = stored.path
        self.objects = stored.objects
        self._weights = {key: info for key, info in stored.tensors.items() if not is_state(key)}
        dtypes = {
            kind: info.dtype
            for key, info in stored.tensors.items()
            if FLAT_STATES in key and (kind := state_kind(key)) is not None
        }
        names = dict.fromkeys(name for name, _ in self._places)
        self.tensors: Mapping[str, TensorInfo] = self._weights | {
            f"{_STATE}{kind}.{name}": TensorInfo(self._weights[name].shape, dtypes[kind])
            for kind in sorted(dtypes)
            for name in names
        }

    @property
    def recorded(self) -> Recorded:
        """What the checkpoint says about itself."""
        return self._stored.recorded

    def read(self, name: str, first: int | None = None) -> Tensor:
        """Return a tensor, or what lies at place ``first`` of its first axis."""
        if name in self._weights:
            return self._stored.read(name, first)
        kind, _, weight = name.removeprefix(_STATE).partition(".")
        shape = self.tensors[name].shape
        if (weight, None) in self._places:  # of one layer, or of none
            whole = self._read((weight, None), kind).view(shape)
            return whole if first is None else whole[first].clone()
        if first is not None:
            return self._read((weight, first), kind).view(shape[1:])
        return torch.stack(
            [self._read((weight, layer), kind).view(shape[1:]) for layer in range(shape[0])]
        )

    def _read(self, at: tuple[str, int | None], kind: str) -> Tensor:
        """Return the states of one layer of a stored tensor, 1-D, expert by expert."""
        return torch.cat([_read(self._stored, place, kind) for place in self._places[at]])


def has_flat_states(stored: TorchDistReader) -> bool:
    """Return whether a checkpoint keeps its states by bucket."""
    return bool(flat_groups(stored))


def doubt_of_flat_states(stored: TorchDistReader) -> str | None:
    """Say why flat states cannot be read by name, without reading a value; None if sizes fit."""
    try:
        _groups(stored)
    except LayoutError as error:
        return str(error)
    return None


def _groups(stored: TorchDistReader) -> list[_Group]:
    """Return the data-parallel groups with the orders that their sizes leave.

    Raises:
        LayoutError: nothing tells which parameters they have, or none of the orders fits.
    """
    where, sizes = stored.path, stored.recorded.parallel_sizes
    if not stored.arguments:
        raise LayoutError(_refusal(where, "Megatron's arguments beside them", "none"))
    cut = [f"{name} {sizes[name]}" for name in _UNCUT if sizes.get(name, 1) > 1]
    if cut:
        raise LayoutError(_refusal(where, "no parallel sizes but data and expert", ", ".join(cut)))
    view = LayerView(stored, num_layers=_num_layers(stored))
    names = [key for key in view.tensors if not is_state(key) and _is_parameter(key)]
    order = registration_order(names, str(stored.arguments.get("transformer_impl")))
    if order is None:
        unknown = [name for name in names if registration_order([name], "local") is None]
        raise LayoutError(_refusal(where, "modules whose order is known", listed(unknown)))
    parameters = [
        Parameter(name=name, shape=view.tensors[name].shape, dtype=str(view.tensors[name].dtype))
        for name in order
    ]
    most = max(
        (one.shape[0] for one in parameters if _EXPERTS in one.name and one.shape), default=0
    )
    if most > MAX_EXPERTS:
        raise LayoutError(_refusal(where, f"at most {MAX_EXPERTS:,} experts", f"{most:,}"))
    groups = _shares(stored, parameters, sizes.get("expert", 1))
    for group in groups:
        if not group.candidates:
            numel = sum(parameter.numel for parameter in group.parameters)
            found = sum(buffer.numel for buffer in read_buffers(stored, group.name))
            raise LayoutError(
                _refusal(
                    where,
                    f"{group.name} to be laid out as Megatron lays out {numel:,} elements of these "
                    "weights",
                    f"{found:,} elements, laid out otherwise",
                )
            )
    return groups


def _shares(
    stored: TorchDistReader, parameters: Sequence[Parameter], expert_parallel: int
) -> list[_Group]:
    """Return which parameters each group has: all of them, or some of the experts."""
    names = flat_groups(stored)
    count = 1 if expert_parallel == 1 else 1 + expert_parallel
    if len(names) != count:
        raise LayoutError(
            _refusal(stored.path, f"{count:,} groups of ranks", f"{len(names)}: {listed(names)}")
        )
    for name in names:
        if (key := lower_bits_of_masters(stored, name)) is not None:
            raise LayoutError(_refusal(stored.path, "whole masters", f"lower bits of them: {key}"))
        if any(buffer.is_quantized for buffer in read_buffers(stored, name)):
            raise LayoutError(_refusal(stored.path, "weights in high precision", "quantized ones"))
    wanted: list[tuple[Sequence[Parameter], int]] = [(parameters, 0)]
    if expert_parallel > 1:
        dense = [one for one in parameters if _EXPERTS not in one.name]
        experts = [one for one in parameters if _EXPERTS in one.name]
        local = _experts_of(experts) // expert_parallel
        mine = [replace(one, shape=(local, *one.shape[1:])) for one in experts]
        wanted = [(dense, 0), *((mine, local * rank) for rank in range(expert_parallel))]
    interleave = stored.recorded.glu_interleave or None
    return [
        _Group(
            name=name,
            parameters=tuple(of_group),
            first_expert=first_expert,
            candidates=tuple(derive_manifests([of_group], read_buffers(stored, name), interleave)),
        )
        for name, (of_group, first_expert) in zip(names, wanted, strict=True)
    ]


def _experts_of(parameters: Sequence[Parameter]) -> int:
    """Return how many experts a layer has, 0 where that is not the same everywhere."""
    counts = {one.shape[0] for one in parameters if one.shape}
    return counts.pop() if len(counts) == 1 and all(one.shape for one in parameters) else 0


def _shown_places(
    stored: TorchDistReader, view: LayerView, groups: Sequence[_Group]
) -> list[tuple[_Shown, _Place]]:
    """Return where the states of each parameter and expert lie, as values show."""
    places: list[tuple[_Shown, _Place]] = []
    for group in groups:
        fitting = []
        strangers: set[str] = set()
        for candidate in group.candidates:
            found = _places_of(group, candidate)
            wrong = _stranger(stored, view, found)
            if wrong is None:
                fitting.append(found)
            else:
                strangers.add(wrong)
        if len(fitting) != 1:
            raise LayoutError(
                _refusal(
                    stored.path,
                    f"masters of {group.name} that round to the weights saved beside them in one "
                    "of Megatron's orders",
                    f"{len(fitting)} orders in which they do"
                    if fitting
                    else f"others at {listed(sorted(strangers))}",
                )
            )
        places += fitting[0].items()
    return places


def _places_of(group: _Group, manifest: StateManifest) -> dict[_Shown, _Place]:
    return {
        _key(address, group.first_expert): _Place(
            group.name, manifest.buffers[read.buffer].dtype, read
        )
        for address, read in manifest.addresses().items()
    }


def _key(address: Address, first_expert: int) -> _Shown:
    expert = None if address.expert is None else first_expert + address.expert
    return address.parameter, expert


def _stranger(
    stored: TorchDistReader, view: LayerView, places: Mapping[_Shown, _Place]
) -> str | None:
    """Return a parameter whose masters do not round to its weights, None if all do."""
    held: tuple[str, Tensor] | None = None
    for (name, expert), place in places.items():
        if held is None or held[0] != name:
            held = (name, view.read(name))
        weight = held[1] if expert is None else held[1][expert]
        rounded = _read(stored, place, "param").to(weight.dtype)
        weight = weight.reshape(-1)
        if not bool(((rounded == weight) | (rounded.isnan() & weight.isnan())).all()):
            return name if expert is None else f"expert {expert} of {name}"
    return None


def _read(stored: TorchDistReader, place: _Place, kind: str) -> Tensor:
    """Return states of one kind, 1-D."""
    read = place.read
    key = f"{bucket_key(place.group, place.dtype, read.buffer, read.bucket)}.{kind}"
    return stored.read_box(key, (read.start,), (read.numel,))


def _by_expert(one: tuple[_Shown, _Place]) -> int:
    (_, expert), _ = one
    return expert or 0


def _is_parameter(key: str) -> bool:
    """Return whether a tensor of a checkpoint is trained: amaxes and biases of routing are not."""
    return "experts.experts." not in key and not key.endswith(".router.expert_bias")


def _num_layers(stored: TorchDistReader) -> int | None:
    layers = stored.arguments.get("num_layers")
    return layers if type(layers) is int and layers > 0 else None


def _refusal(where: Path, expected: str, got: str) -> str:
    return (
        f"{where}: expected flat optimizer states that can be told apart by parameter: "
        f"{expected}, got {got}. {REMEDY}"
    )
