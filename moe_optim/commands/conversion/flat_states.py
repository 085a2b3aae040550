"""Parameters of each group of flat states, and their possible orders given the sizes.

Reads ``.metadata`` and the saved arguments, no tensor values. Flat states are in the reverse of the
order in which modules of Megatron 0.19.2 register parameters in ``__init__``: ``GPTModel``,
``TransformerLayer``, ``SelfAttention``, ``MLASelfAttention``, ``MLP`` and ``MoELayer``. Callers
must verify it against values.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_optim.checkpoint.derived_manifest import Parameter, choose_by_values, derive_manifests
from moe_optim.checkpoint.files.reader import (
    FLAT_STATES,
    CheckpointReader,
    FileFormat,
    Recorded,
    TensorInfo,
    is_state,
)
from moe_optim.checkpoint.files.torch_dist import TorchDistReader
from moe_optim.checkpoint.flat_buffers import (
    bucket_key,
    flat_groups,
    lower_bits_of_masters,
    read_buffers,
    rounds_to,
)
from moe_optim.checkpoint.state_kinds import MOMENTUM, state_kinds
from moe_optim.checkpoint.state_manifest import MANIFEST, BucketSpan, StateManifest
from moe_optim.commands.conversion.layer_view import STATE, LayerView, state_kind
from moe_optim.errors import LayoutError, listed
from moe_optim.experts.keys.finding import MAX_EXPERTS

_EXPERTS = ".mlp.experts."
_UNCUT = ("tensor", "pipeline", "virtual pipeline", "expert tensor")

_LAYER = re.compile(r"decoder\.layers\.(0|[1-9][0-9]{0,3})\.(.+)")
_INPUT_NORM = "self_attention.linear_qkv.layer_norm_weight"
_ATTENTION = (
    "self_attention.linear_proj.weight",
    "self_attention.linear_proj.bias",
    "self_attention.linear_q_proj.weight",
    "self_attention.linear_q_down_proj.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.linear_q_up_proj.weight",
    "self_attention.linear_kv_down_proj.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight",
    "self_attention.linear_kv_up_proj.weight",
    _INPUT_NORM,
    "self_attention.linear_qkv.weight",
    "self_attention.linear_qkv.bias",
    "self_attention.q_layernorm.weight",
    "self_attention.k_layernorm.weight",
    "self_attention.kv_layernorm.weight",
)
_NETWORK = (
    "pre_mlp_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight",
    "mlp.linear_fc1.weight",
    "mlp.linear_fc1.bias",
    "mlp.linear_fc2.weight",
    "mlp.linear_fc2.bias",
    "mlp.router.weight",
    "mlp.router.bias",
    "mlp.experts.linear_fc1.weight",
    "mlp.experts.linear_fc1.bias",
    "mlp.experts.linear_fc2.weight",
    "mlp.experts.linear_fc2.bias",
    "mlp.shared_experts.linear_fc1.weight",
    "mlp.shared_experts.linear_fc2.weight",
)
_FUSED = ("input_layernorm.weight", *_ATTENTION, *_NETWORK)
# Megatron's local layers store the first norm as part of the next module
_APART = (
    "input_layernorm.weight",
    _INPUT_NORM,
    *(name for name in _ATTENTION if name != _INPUT_NORM),
    *_NETWORK,
)
_FIRST = ("embedding.word_embeddings.weight", "embedding.position_embeddings.weight")
_LAST = (
    "decoder.final_layernorm.weight",
    "output_layer.weight",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatGroup:
    """A data-parallel group, whose ranks shared buckets."""

    name: str
    """Prefix of its keys."""
    parameters: tuple[Parameter, ...]
    """Parameters in registration order; experts are numbered from 0 in each group."""
    first_expert: int
    candidates: tuple[StateManifest, ...]


def read_groups(stored: TorchDistReader) -> list[FlatGroup]:
    """Return the data-parallel groups with the orders that sizes permit; LayoutError if none."""
    where, sizes = stored.path, stored.recorded.parallel_sizes
    if not stored.arguments:
        raise refusal(where, "Megatron's arguments beside them", "none")
    if MOMENTUM in state_kinds(stored.tensors):
        raise refusal(where, "states of Adam alone", f"Muon's ({MOMENTUM}), laid out otherwise")
    cut = [f"{name} {sizes[name]}" for name in _UNCUT if sizes.get(name, 1) > 1]
    if cut:
        raise refusal(where, "no parallel sizes but data and expert", ", ".join(cut))
    view = LayerView(stored, num_layers=num_layers_of(stored))
    names = [key for key in view.tensors if not is_state(key) and _is_parameter(key)]
    order = _registration_order(names, str(stored.arguments.get("transformer_impl")))
    if order is None:
        unknown = [name for name in names if _registration_order([name], "local") is None]
        raise refusal(where, "modules whose order is known", listed(unknown))
    parameters = [
        Parameter(name=name, shape=view.tensors[name].shape, dtype=str(view.tensors[name].dtype))
        for name in order
    ]
    counts = [one.shape[0] for one in parameters if _EXPERTS in one.name and one.shape]
    if max(counts, default=0) > MAX_EXPERTS:
        raise refusal(where, f"at most {MAX_EXPERTS:,} experts", f"{max(counts):,}")
    groups = _shares(stored, parameters, sizes.get("expert", 1))
    for group in groups:
        if not group.candidates:
            numel = sum(parameter.numel for parameter in group.parameters)
            found = sum(buffer.numel for buffer in read_buffers(stored, group.name))
            expected = (
                f"{group.name} to be laid out as Megatron lays out {numel:,} elements of these "
                "weights"
            )
            raise refusal(where, expected, f"{found:,} elements, laid out otherwise")
    return groups


def _shares(
    stored: TorchDistReader, parameters: Sequence[Parameter], expert_parallel: int
) -> list[FlatGroup]:
    names = flat_groups(stored)
    count = 1 if expert_parallel == 1 else 1 + expert_parallel
    if len(names) != count:
        got = f"{len(names)}: {listed(names)}"
        raise refusal(stored.path, f"{count:,} groups of ranks", got)
    for name in names:
        if (key := lower_bits_of_masters(stored, name)) is not None:
            raise refusal(stored.path, "whole masters", f"lower bits of them: {key}")
        if any(buffer.is_quantized for buffer in read_buffers(stored, name)):
            raise refusal(stored.path, "weights in high precision", "quantized ones")
    wanted: list[tuple[Sequence[Parameter], int]] = [(parameters, 0)]
    if expert_parallel > 1:
        dense = [one for one in parameters if _EXPERTS not in one.name]
        experts = [one for one in parameters if _EXPERTS in one.name]
        of_layer = {one.shape[0] if one.shape else 0 for one in experts}
        local = (of_layer.pop() if len(of_layer) == 1 else 0) // expert_parallel
        mine = [replace(one, shape=(local, *one.shape[1:])) for one in experts]
        wanted = [(dense, 0), *((mine, local * rank) for rank in range(expert_parallel))]
    interleave = stored.recorded.glu_interleave or None
    return [
        FlatGroup(
            name=name,
            parameters=tuple(of_group),
            first_expert=first_expert,
            candidates=tuple(derive_manifests([of_group], read_buffers(stored, name), interleave)),
        )
        for name, (of_group, first_expert) in zip(names, wanted, strict=True)
    ]


def _registration_order(names: Iterable[str], transformer_impl: str) -> list[str] | None:
    """Return parameter names in the order in which a model registers them.

    Args:
        names: parameter names in ``torch_dist``, one per layer, experts in layout ``grouped``.
        transformer_impl: Megatron's argument.

    Returns:
        Ordered names; None if one belongs to an unknown module.
    """
    within = _APART if transformer_impl == "local" else _FUSED
    places: dict[str, tuple[int, int, int]] = {}
    for name in names:
        layer = _LAYER.fullmatch(name)
        if layer and layer[2] in within:
            places[name] = (1, int(layer[1]), within.index(layer[2]))
        elif name in _FIRST:
            places[name] = (0, 0, _FIRST.index(name))
        elif name in _LAST:
            places[name] = (2, 0, _LAST.index(name))
        else:
            return None
    return sorted(places, key=lambda name: places[name])


def _is_parameter(key: str) -> bool:
    """Return whether a key is a trained tensor, not an amax or a routing bias."""
    return "experts.experts." not in key and not key.endswith(".router.expert_bias")


def num_layers_of(stored: TorchDistReader) -> int | None:
    """Return the number of layers in the saved arguments, or None."""
    layers = stored.arguments.get("num_layers")
    return layers if type(layers) is int and layers > 0 else None


def refusal(where: Path, expected: str, got: str) -> LayoutError:
    """Return the error for flat states whose layout is uncertain."""
    return LayoutError(
        f"{where}: expected flat optimizer states that can be told apart by parameter: "
        f"{expected}, got {got}. Load it at its own sizes and save with "
        "--dist-ckpt-optim-fully-reshardable, or convert with --weights-only."
    )


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
    if isinstance(reader, TorchDistReader) and flat_groups(reader):
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
