"""Shows flat states of stock Megatron by parameter name.

Stock Megatron does not record the layout of its buckets. The saved arguments determine how
parameters were sharded and laid out; stored sizes and offsets usually leave one order of experts.
An order is accepted if every master, read at the offset it implies, rounds to the weight saved
beside it. Otherwise nothing is read.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_optim.checkpoint.derived_manifest import choose_by_values, rounds_to
from moe_optim.checkpoint.files.reader import (
    FLAT_STATES,
    CheckpointReader,
    FileFormat,
    Recorded,
    TensorInfo,
    is_state,
)
from moe_optim.checkpoint.files.torch_dist import TorchDistReader
from moe_optim.checkpoint.state_kinds import bucket_key, flat_groups
from moe_optim.checkpoint.state_manifest import MANIFEST, BucketSpan, StateManifest
from moe_optim.commands.conversion.flat_groups import FlatGroup, num_layers_of, read_groups, refusal
from moe_optim.commands.conversion.layer_view import STATE, LayerView, state_kind

_Shown = tuple[str, int | None]
"""Parameter key including the layer, and global expert number, None for other parameters."""

_HYPER = re.compile(r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_\d+\.(\w+)/.*")
"""Key of an object of a data-parallel group: number of its optimizer, name."""
_OF_BUCKETS = ("per_bucket_numel", "per_bucket_numel_unpadded", MANIFEST)
_BY_NAME = "fully_reshardable"
_PLAIN = (bool, int, float, str, type(None))
_MOST_VALUES, _DEEPEST = 100_000, 10
"""Limits above any hyper-parameters; larger objects are refused."""


_Place = tuple[str, BucketSpan]
"""Key prefix of a bucket's states, and the part of it that is a parameter, or one expert of it."""


class NamedStates:
    """A ``torch_dist`` checkpoint that shows its flat states as if saved by name.

    Implements :class:`~moe_optim.checkpoint.files.reader.CheckpointReader`. States are named
    ``optimizer.state.exp_avg.`` and so on, followed by the name of the weight, and have its shape.
    Objects are those that Megatron saves beside such states.
    """

    format: FileFormat = "torch_dist"

    def __init__(self, stored: TorchDistReader) -> None:
        """Determine the layout: reads all masters and all weights, one at a time.

        Raises:
            LayoutError: the layout is uncertain; the message states the reason and the remedy.
            StateError: a file is missing or damaged.
        """
        groups = read_groups(stored)
        view = LayerView(stored, num_layers=num_layers_of(stored))
        self.stored = stored
        self._places: dict[tuple[str, int | None], list[_Place]] = {}
        found = [one for group in groups for one in _places_by_values(stored, view, group).items()]
        for (shown, _), place in sorted(found, key=lambda one: one[0][1] or 0):  # by expert
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
            f"{STATE}{kind}.{name}": TensorInfo(self._weights[name].shape, dtypes[kind])
            for kind in sorted(dtypes)
            for name in names
        }

    @property
    def recorded(self) -> Recorded:
        """Facts that the checkpoint records about itself."""
        return self.stored.recorded

    def read(self, name: str, *index: int | range) -> Tensor:
        """Return a tensor or a part of it, see ``CheckpointReader``."""
        if name in self._weights:
            return self.stored.read(name, *index)
        kind, _, weight = name.removeprefix(STATE).partition(".")
        shape = self.tensors[name].shape
        if (weight, None) in self._places:  # single or no layer
            return self._read((weight, None), kind, shape, index)
        layers = index[0] if index else range(shape[0])
        if isinstance(layers, int):
            return self._read((weight, layers), kind, shape[1:], index[1:])
        return torch.stack([self.read(name, layer) for layer in layers])

    def cuts(self, name: str, *index: int) -> Sequence[int]:
        """Return the places at which an axis can be cut: layers and experts come apart."""
        if name in self._weights:
            return self.stored.cuts(name, *index)
        weight = name.removeprefix(STATE).partition(".")[2]
        size = self.tensors[name].shape[len(index)]
        at: tuple[str, int | None] = (weight, None)
        within = index
        if at not in self._places:
            at, within = (weight, index[0] if index else None), index[1:]
        is_apart = not within and len(self._places.get(at, range(size))) == size
        return range(size + 1) if is_apart else (0, size)

    def _read(
        self,
        at: tuple[str, int | None],
        kind: str,
        shape: tuple[int, ...],
        index: tuple[int | range, ...],
    ) -> Tensor:
        """Return states of one layer, of ``shape``, or those at an ``index`` on its first axis."""
        places, first = self._places[at], index[0] if index else range(shape[0])
        rows = range(first, first + 1) if isinstance(first, int) else first
        is_apart = len(places) == shape[0]  # expert by expert
        if is_apart:
            places = places[rows.start : rows.stop]
        flat = torch.cat([_read(self.stored, place, kind) for place in places])
        values = flat.view(-1, *shape[1:])
        if not is_apart and len(rows) < shape[0]:
            values = values[rows.start : rows.stop].clone()
        return values[0] if isinstance(first, int) else values


def states_by_name(reader: CheckpointReader) -> CheckpointReader:
    """Return a checkpoint with its states by name, converting flat ones.

    Raises as :class:`NamedStates` does.
    """
    if isinstance(reader, TorchDistReader) and flat_groups(reader.tensors):
        return NamedStates(reader)
    return reader


def _places_by_values(
    stored: TorchDistReader, view: LayerView, group: FlatGroup
) -> dict[_Shown, _Place]:
    """Return the location of each parameter and expert, in the one order whose values match."""
    fitting, got = choose_by_values(
        [_places_of(group, candidate) for candidate in group.candidates],
        lambda found: _strangers(stored, view, found),
    )
    if len(fitting) == 1:
        return fitting[0]
    expected = (
        f"masters of {group.name} that round to the weights saved beside them in one of Megatron's "
        "orders"
    )
    raise refusal(stored.path, expected, got)


def _places_of(group: FlatGroup, manifest: StateManifest) -> dict[_Shown, _Place]:
    places = {}
    for address, span in manifest.addresses().items():
        expert = None if address.expert is None else group.first_expert + address.expert
        dtype = manifest.buffers[span.buffer].dtype
        bucket = bucket_key(group.name, dtype, span.buffer, span.bucket)
        places[address.parameter, expert] = bucket, span
    return places


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
    bucket, span = place
    return stored.read_box(f"{bucket}.{kind}", (span.start,), (span.numel,))


def named_common_entries(stored: TorchDistReader) -> Mapping[str, Any]:
    """Return the entries of Megatron's common state that differ if states are saved by name.

    Flat states come with an object of optimizer hyper-parameters per data-parallel group; states by
    name have them in the common state, equal on all ranks.

    Raises:
        LayoutError: hyper-parameters are missing, differ between ranks, or are not plain values.
    """
    optimizers: dict[int | None, dict[str, Any]] = defaultdict(dict)
    for name in sorted(stored.objects):
        match = _HYPER.fullmatch(name)
        if match is None or match[2] in _OF_BUCKETS:
            continue
        of_optimizer = optimizers[None if match[1] is None else int(match[1])]
        value = _plain(stored, name, stored.read_object(name))
        if of_optimizer.setdefault(match[2], value) != value:
            raise refusal(
                stored.path, "the same hyper-parameters for all ranks", f"others in {name}"
            )
    if not optimizers:
        raise refusal(stored.path, "hyper-parameters beside them", "none")
    by_name = {
        index: {**entries, "param_state_sharding_type": _BY_NAME}
        for index, entries in sorted(optimizers.items(), key=lambda one: one[0] or 0)
    }
    content = stored.common_state.get("content_metadata") or {}
    return {
        "optimizer": by_name.get(None, by_name),
        "content_metadata": {
            **_plain(stored, "content_metadata", content),
            "distrib_optim_sharding_type": _BY_NAME,
            "distrib_optim_fully_reshardable_mem_efficient": False,
        },
    }


def _plain(stored: TorchDistReader, name: str, value: Any) -> Any:
    """Return a plain value of numbers and text; LayoutError for anything else."""
    waiting, is_plain = [(0, value)], True
    for _ in range(_MOST_VALUES):  # shared and cyclic values count each time
        if not (waiting and is_plain):
            break
        depth, one = waiting.pop()
        if isinstance(one, dict | list | tuple) and depth < _DEEPEST:
            parts = [*one, *one.values()] if isinstance(one, dict) else one
            waiting += [(depth + 1, part) for part in parts]
        else:
            is_plain = isinstance(one, _PLAIN)
    if waiting or not is_plain:
        raise refusal(stored.path, "hyper-parameters in numbers and text", f"others in {name}")
    return value
