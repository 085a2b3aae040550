"""Flat states of stock Megatron, read by the names of their parameters.

Stock Megatron does not record what lies where in a bucket. The arguments saved with a checkpoint
say how parameters were shared and laid out, and sizes and edges of what is stored leave one order
of experts, seldom more. It is certain when every master, taken from where the order says, rounds to
the weight that was saved beside it. Else nothing is read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moe_optim.checkpoint.derived_manifest import choose_by_values
from moe_optim.checkpoint.files.reader import (
    FLAT_STATES,
    CheckpointReader,
    FileFormat,
    Recorded,
    TensorInfo,
    is_state,
)
from moe_optim.checkpoint.files.torch_dist import TorchDistReader
from moe_optim.checkpoint.flat_buffers import bucket_key, flat_groups, rounds_to
from moe_optim.checkpoint.state_manifest import Address, BucketSpan, StateManifest
from moe_optim.commands.conversion.flat_groups import FlatGroup, num_layers_of, read_groups, refusal
from moe_optim.commands.conversion.layer_view import LayerView, state_kind
from moe_optim.errors import LayoutError

_STATE = "optimizer.state."


_Shown = tuple[str, int | None]
"""Key of a parameter, layers told apart, and number of an expert among all; None: of no expert."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the states of a parameter, or of one expert of one, lie."""

    group: str
    dtype: str
    span: BucketSpan


class NamedStates:
    """A ``torch_dist`` checkpoint whose flat states are shown as if they had been saved by name.

    It is a :class:`~moe_optim.checkpoint.files.reader.CheckpointReader`. States are called
    ``optimizer.state.exp_avg.`` and so on, with the name and the shape of the weight behind.
    Objects are those that Megatron saves beside such states.
    """

    format: FileFormat = "torch_dist"

    def __init__(self, stored: TorchDistReader) -> None:
        """Find out what lies where: reads all masters and all weights, one at a time.

        Raises:
            LayoutError: it is not certain; says why, and what to do.
            StateError: a file is missing or damaged.
        """
        groups = read_groups(stored)
        view = LayerView(stored, num_layers=num_layers_of(stored))
        self.stored = stored
        """What is in the files."""
        self._places: dict[tuple[str, int | None], list[_Place]] = {}
        for (shown, _), place in sorted(_shown_places(stored, view, groups), key=_by_expert):
            stands = view.places[shown]
            self._places.setdefault((stands.name, stands.layer), []).append(place)
        self.path: Path = stored.path
        self.objects = {name: n for name, n in stored.objects.items() if not is_state(name)}
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
        return self.stored.recorded

    def read(self, name: str, first: int | None = None) -> Tensor:
        """Return a tensor, or what lies at place ``first`` of its first axis."""
        if name in self._weights:
            return self.stored.read(name, first)
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
        return torch.cat([_read(self.stored, place, kind) for place in self._places[at]])


def has_flat_states(stored: TorchDistReader) -> bool:
    """Return whether a checkpoint keeps its states by bucket."""
    return bool(flat_groups(stored))


def states_by_name(reader: CheckpointReader) -> CheckpointReader:
    """Return a checkpoint with its states by name, also where they are flat.

    Raises as :class:`NamedStates` does.
    """
    if isinstance(reader, TorchDistReader) and has_flat_states(reader):
        return NamedStates(reader)
    return reader


def _shown_places(
    stored: TorchDistReader, view: LayerView, groups: Sequence[FlatGroup]
) -> list[tuple[_Shown, _Place]]:
    """Return where the states of each parameter and expert lie, as values show."""
    places: list[tuple[_Shown, _Place]] = []
    for group in groups:
        fitting, got = choose_by_values(
            [_places_of(group, candidate) for candidate in group.candidates],
            lambda found: _strangers(stored, view, found),
        )
        if len(fitting) != 1:
            raise LayoutError(
                refusal(
                    stored.path,
                    f"masters of {group.name} that round to the weights saved beside them in one "
                    "of Megatron's orders",
                    got,
                )
            )
        places += fitting[0].items()
    return places


def _places_of(group: FlatGroup, manifest: StateManifest) -> dict[_Shown, _Place]:
    return {
        _key(address, group.first_expert): _Place(
            group.name, manifest.buffers[span.buffer].dtype, span
        )
        for address, span in manifest.addresses().items()
    }


def _key(address: Address, first_expert: int) -> _Shown:
    expert = None if address.expert is None else first_expert + address.expert
    return address.parameter, expert


def _strangers(
    stored: TorchDistReader, view: LayerView, places: Mapping[_Shown, _Place]
) -> set[str]:
    """Return the first parameter whose masters do not round to its weights."""
    held: tuple[str, Tensor] | None = None
    for (name, expert), place in places.items():
        if held is None or held[0] != name:
            held = (name, view.read(name))
        weight = held[1] if expert is None else held[1][expert]
        if not rounds_to(_read(stored, place, "param"), weight.reshape(-1)):
            return {name if expert is None else f"expert {expert} of {name}"}
    return set()


def _read(stored: TorchDistReader, place: _Place, kind: str) -> Tensor:
    """Return states of one kind, 1-D."""
    span = place.span
    key = f"{bucket_key(place.group, place.dtype, span.buffer, span.bucket)}.{kind}"
    return stored.read_box(key, (span.start,), (span.numel,))


def _by_expert(one: tuple[_Shown, _Place]) -> int:
    (_, expert), _ = one
    return expert or 0
