"""Flat states: masters and moments saved bucket by bucket, and loaded into another bucket layout.

torch_dist's ``dp_reshardable`` and ``--ckpt-format torch`` store states this way. The
:class:`StateManifest` saved with them lets a model of another expert layout read them.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary
from zlib import crc32

import megatron.core
import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.optimizer.param_layout import pad_param_start
from torch import Tensor

from moe_optim.checkpoint.state_manifest import (
    MANIFEST,
    MOMENTUM,
    BucketPlaces,
    BucketSpan,
    BufferPlaces,
    LayoutMap,
    ParameterPlace,
    StateManifest,
    bucket_key,
)
from moe_optim.errors import LayoutError, StateError
from moe_optim.version import VERSION
from moe_optim.weights.names import parameter_names

_BUCKET_SIZES = ("per_bucket_numel", "per_bucket_numel_unpadded")


@dataclass(frozen=True, eq=False)
class ManifestRequester:
    """The optimizer that a checkpoint will be loaded into."""

    optimizer: Any
    model: Any
    """Sharded model state that was given to the optimizer."""
    is_flat: bool
    """Whether it loads states by bucket rather than by parameter name."""


_requesters: WeakValueDictionary[int, ManifestRequester] = WeakValueDictionary()
_numbers = itertools.count()


@dataclass
class ManifestRequest(ShardedObject):
    """Placeholder for a manifest in a state to load, which :mod:`loading` replaces.

    Megatron may prefix its key with the optimizer number, and compares requests across ranks.
    """

    number: int = field(default=0, compare=False)

    @property
    def requester(self) -> ManifestRequester:
        """The optimizer that made the request; StateError if that was for an earlier load."""
        found = _requesters.get(self.number)
        if found is None:
            raise StateError(
                f"{self.key}: expected a state to load that its optimizer made last, got an older "
                "one. Call optimizer.sharded_state_dict(..., is_loading=True) for every load."
            )
        return found

    @property
    def group(self) -> str:
        """Key prefix of the states, such as ``optimizer...dp_group_idx_0``."""
        return self.key.partition(f".{MANIFEST}.")[0]


def manifest_of(optimizer: Any) -> StateManifest:
    """Return the manifest of a distributed optimizer's states."""
    places = places_of(optimizer)
    buffers = []
    for ranges, buffer in zip(optimizer.gbuf_ranges, optimizer.buffers, strict=True):
        (dtype,) = ranges
        buckets = []
        for bucket in buffer.buckets:
            held = sorted((places[p] for p in bucket.params_list), key=lambda one: one.start)
            buckets.append(BucketPlaces(numel=bucket.numel_unpadded, parameters=tuple(held)))
        buffers.append(BufferPlaces(dtype=str(dtype), buckets=tuple(buckets)))
    return StateManifest(
        buffers=tuple(buffers),
        glu_interleave=optimizer.model_chunks[0].config.moe_mlp_glu_interleave_size,
        versions={
            "moe_optim": VERSION,
            "megatron-core": megatron.core.__version__,
            "torch": str(torch.__version__),
        },
    )


def places_of(optimizer: Any) -> dict[torch.nn.Parameter, ParameterPlace]:
    """Return the place of each parameter in its bucket."""
    names = manifest_names(optimizer.model_chunks)
    return {
        param: ParameterPlace(
            name=names[param], shape=tuple(param.shape), start=bucket.param_to_index[param][0]
        )
        for buffer in optimizer.buffers
        for bucket in buffer.buckets
        for param in bucket.params_list
    }


def manifest_names(chunks: Sequence[Any]) -> dict[torch.nn.Parameter, str]:
    """Return parameter names, prefixed by chunk if there are several model chunks."""
    names = parameter_names(chunks)
    if len(chunks) == 1:
        return names
    return {
        param: f"chunk{number}.{names[param]}"
        for number, chunk in enumerate(chunks)
        for param in chunk.parameters()
    }


def manifest_key(optimizer: Any, manifest: StateManifest) -> str:
    """Return the key that a manifest is saved under, independent of the expert layout."""
    parameters = sorted({address.parameter for address in manifest.addresses()})
    digest = crc32("\n".join(parameters).encode())
    return f"{_group_key(optimizer)}.{MANIFEST}.{digest:08x}"


def _group_key(optimizer: Any) -> str:
    return f"optimizer.distributed.dp_group_idx_{optimizer.data_parallel_group_idx}"


def manifest_object(
    optimizer: Any, model: Any, *, is_loading: bool, is_flat: bool
) -> ShardedObject:
    """Return the manifest to save, or the request for one when loading. No rank communicates.

    See :class:`ManifestRequester` for ``model`` and ``is_flat``.
    """
    manifest = manifest_of(optimizer)
    key = manifest_key(optimizer, manifest)
    if not is_loading:
        return _object(optimizer, key, manifest.to_dict())
    number = next(_numbers)
    requester = ManifestRequester(optimizer, model, is_flat)
    optimizer.requester = _requesters[number] = requester  # kept alive until the next request
    return ManifestRequest(key, None, (1,), (0,), _replica_id(optimizer), number)


def _replica_id(optimizer: Any) -> tuple[int, int, int]:
    rank = optimizer.data_parallel_group.rank()  # every rank of the group has a copy
    return optimizer.distributed_optimizer_instance_id, 0, rank


def _object(optimizer: Any, key: str, content: Any) -> ShardedObject:
    return ShardedObject(key, content, (1,), (0,), _replica_id(optimizer))


def _elements(optimizer: Any, key: str, tensor: Tensor, start: int, numel: int) -> ShardedTensor:
    return ShardedTensor(
        key,
        tensor,
        tensor.dtype,
        tuple(tensor.shape),
        (numel,),
        (start,),
        axis_fragmentations=None,
        replica_id=(optimizer.distributed_optimizer_instance_id, 0, 0),
    )


@dataclass(frozen=True, slots=True)
class OwnedRange:
    """The part of a parameter that this rank owns."""

    param: torch.nn.Parameter
    buffer: int
    bucket: int
    start: int
    """First element within the parameter."""
    end: int
    local_start: int
    """First element within this rank's shard of the bucket."""


def owned_ranges(optimizer: Any) -> list[OwnedRange]:
    """Return the ranges that this rank owns, ordered by buffer, bucket and offset."""
    return [
        OwnedRange(
            param,
            buffer,
            bucket,
            ranges["param"].start,
            ranges["param"].end,
            ranges["gbuf_local"].start,
        )
        for buffer, by_dtype in enumerate(optimizer.gbuf_ranges)
        for buckets in by_dtype.values()
        for bucket, held in enumerate(buckets)
        for param, ranges in sorted(
            held["param_map"].items(), key=lambda item: item[1]["gbuf_local"].start
        )
    ]


def flat_states(optimizer: Any, param: torch.nn.Parameter) -> dict[str, Tensor]:
    """Return this rank's shard of master and moments, 1-D, without ``step``."""
    states = optimizer._get_main_param_and_optimizer_states(param)
    return {key: state.view(-1) for key, state in states.items() if key != "step"}


def require_megatrons_offsets(manifest: StateManifest) -> None:
    """Raise LayoutError if stock Megatron would read flat states at other offsets."""
    ends: Counter[tuple[int, int]] = Counter()
    for buffer, bucket, place in manifest.places():
        expected = pad_param_start(ends[buffer, bucket])
        ends[buffer, bucket] = expected + place.numel
        if place.start != expected:
            raise LayoutError(
                f"{place.name}: expected element {expected} of bucket {bucket} in buffer {buffer}, "
                f"where Megatron lays it, got {place.start}: without this package its states would "
                "be read as another parameter's. Save fully reshardable "
                "(--dist-ckpt-optim-fully-reshardable)."
            )


def flat_states_to_save(optimizer: Any) -> dict[Any, Any]:
    """Return this rank's part of ``dp_reshardable`` states. No rank communicates.

    Keys, shapes and offsets are Megatron's, except for Muon: no distributed optimizer of Megatron
    asks for its states, so they can lie elsewhere, and a rank may own only gaps between matrices.
    LayoutError if parameter offsets of other optimizers differ from Megatron's.
    """
    manifest = manifest_of(optimizer)
    if MOMENTUM not in optimizer.optimizer_state_keys:
        require_megatrons_offsets(manifest)
    group_key, group = _group_key(optimizer), optimizer.data_parallel_group
    state: dict[Any, Any] = {
        name: _object(optimizer, f"{group_key}.{name}", getattr(optimizer, name))
        for name in _BUCKET_SIZES
    }
    owned: dict[tuple[int, int], list[OwnedRange]] = defaultdict(list)
    for one in owned_ranges(optimizer):
        owned[one.buffer, one.bucket].append(one)
    for buffer, places in enumerate(manifest.buffers):
        (dtype,) = optimizer.gbuf_ranges[buffer]
        state[buffer] = {dtype: []}
        for bucket, held in enumerate(places.buckets):
            padded = optimizer.buffers[buffer].buckets[bucket].grad_data.numel()
            shard = padded // group.size()
            first = group.rank() * shard
            end = min(shard, max(0, held.numel - first))
            key = bucket_key(group_key, places.dtype, buffer, bucket)
            state[buffer][dtype].append(
                [
                    {
                        name: _elements(
                            optimizer, f"{key}.{name}", tensor, first + start, held.numel
                        )
                        for name, tensor in tensors.items()
                    }
                    for start, tensors in _fill_shard(optimizer, owned[buffer, bucket], end)
                ]
            )
    return state


def _fill_shard(
    optimizer: Any, owned: list[OwnedRange], end: int
) -> list[tuple[int, dict[str, Tensor]]]:
    """Return start and states of all ranges up to ``end``; zeros fill the gaps between them."""
    entries: list[tuple[int, dict[str, Tensor]]] = []
    at = 0
    for one in owned:
        tensors = flat_states(optimizer, one.param)
        if one.local_start > at:
            entries.append((at, _zeros_like(tensors, one.local_start - at)))
        entries.append((one.local_start, tensors))
        at = one.local_start + one.end - one.start
    if end > at:
        device = torch.cuda.current_device()
        names = ("param", *optimizer.optimizer_state_keys)
        nothing = {name: torch.zeros(0, dtype=torch.float32, device=device) for name in names}
        entries.append((at, _zeros_like(entries[-1][1] if entries else nothing, end - at)))
    return entries


def _zeros_like(tensors: dict[str, Tensor], numel: int) -> dict[str, Tensor]:
    return {name: tensor.new_zeros(numel) for name, tensor in tensors.items()}


def flat_states_to_load(optimizer: Any, source: StateManifest, key: str) -> dict[str, Any]:
    """Return requests for this rank's states, at their places in the checkpoint.

    ``optimizer`` has allocated states, with any values. ``source`` is the checkpoint's manifest,
    ``key`` its key with Megatron's prefix. LayoutError if it has other parameters or experts.
    ``ranges`` of the result has a dict per range of :func:`owned_ranges`: state name -> tensors to
    load, of consecutive elements. Bucket sizes are there because strict loads expect them.
    """
    layouts = LayoutMap(source, manifest_of(optimizer), key)
    places = places_of(optimizer)
    group_key = key.partition(f".{MANIFEST}")[0]
    ranges = []
    for one in owned_ranges(optimizer):
        spans = layouts.spans(places[one.param], one.start, one.end)
        entry: dict[str, Any] = {}
        for name, flat in flat_states(optimizer, one.param).items():
            parts = flat.split([span.numel for span in spans])
            entry[name] = [
                _elements(
                    optimizer,
                    f"{saved_key(group_key, source, span)}.{name}",
                    part,
                    span.start,
                    source.buffers[span.buffer].buckets[span.bucket].numel,
                )
                for span, part in zip(spans, parts, strict=True)
            ]
        ranges.append(entry)
    sizes = {name: _object(optimizer, f"{group_key}.{name}", None) for name in _BUCKET_SIZES}
    # a dict: Megatron loads objects and tensors separately, and cannot merge parts of a list
    return {"ranges": ranges, **sizes}


def saved_key(group_key: str, source: StateManifest, span: BucketSpan) -> str:
    """Return the key prefix of a bucket's states in a checkpoint."""
    return bucket_key(group_key, source.buffers[span.buffer].dtype, span.buffer, span.bucket)


def are_flat(loaded: dict[Any, Any]) -> bool:
    """Return whether states were loaded for :func:`flat_states_to_load`."""
    return not loaded.keys().isdisjoint(_BUCKET_SIZES)


def load_flat_states(optimizer: Any, loaded: dict[str, Any]) -> None:
    """Set this rank's states to the tensors loaded for :func:`flat_states_to_load`.

    Tensors that were loaded into the states are not copied.
    """
    ranges = loaded.get("ranges", [])  # Megatron's load drops empty lists
    for one, entry in zip(owned_ranges(optimizer), ranges, strict=True):
        held = flat_states(optimizer, one.param)
        if all(_lie_in(held[name], parts) for name, parts in entry.items()):
            continue
        tensors = {name: torch.cat(parts) for name, parts in entry.items()}
        shape = optimizer._get_main_param_and_optimizer_states(one.param)["param"].shape
        states = {name: tensor.view(shape) for name, tensor in tensors.items()}
        optimizer._set_main_param_and_optimizer_states(one.param, states)


def _lie_in(state: Tensor, parts: list[Tensor]) -> bool:
    """Return whether consecutive parts are the memory of a state."""
    own = state.split([part.numel() for part in parts])
    return all(one.data_ptr() == part.data_ptr() for one, part in zip(own, parts, strict=True))


def rearranged_states(
    states: dict[Any, Any], source: StateManifest, optimizer: Any, where: str
) -> dict[Any, Any]:
    """Return legacy states with experts in the order that ``optimizer`` expects.

    ``states`` are a result of ``get_parameter_state_dp_zero``: buffer -> dtype -> name ->
    [elements], buckets concatenated without padding; not modified. ``source`` is their manifest.
    LayoutError if they have other parameters or experts, or are truncated.
    """
    source, target = source.joined(), manifest_of(optimizer).joined()
    LayoutMap(source, target, where)  # refuses other parameters
    saved = [_tensors(states[number]) for number in range(len(source.buffers))]
    for number, (buffer, tensors) in enumerate(zip(source.buffers, saved, strict=True)):
        (bucket,) = buffer.buckets
        for name, tensor in tensors.items():
            if tensor.numel() != bucket.numel:
                raise LayoutError(
                    f"{where}: buffer {number}: {name}: expected {bucket.numel} elements as the "
                    f"manifest says, got {tensor.numel()}. The file is damaged; load another one."
                )
    names = [name for tensors in saved[:1] for name in tensors]  # empty if all are frozen
    numels = [buffer.numel_unpadded for buffer in optimizer.buffers]
    made = [
        {name: torch.zeros(numel, dtype=torch.float32, device="cpu") for name in names}
        for numel in numels
    ]
    places = source.addresses()
    for address, to in target.addresses().items():
        at = places[address]
        for name in names:
            made[to.buffer][name][to.start : to.end] = saved[at.buffer][name][at.start : at.end]
    result: dict[Any, Any] = {"buckets_coalesced": True}
    for number, ((dtype,), numel) in enumerate(zip(optimizer.gbuf_ranges, numels, strict=True)):
        result[number] = {dtype: {**made[number], "numel_unpadded": numel}}
    return result


def _tensors(by_dtype: dict[Any, dict[str, Any]]) -> dict[str, Tensor]:
    (states,) = by_dtype.values()
    return {name: value for name, value in states.items() if isinstance(value, Tensor)}


def require_same_interleave(
    optimizer: Any, saved: StateManifest, where: str, *, is_flat: bool
) -> None:
    """Raise LayoutError if gate and up rows are interleaved differently in the checkpoint."""
    here = optimizer.model_chunks[0].config.moe_mlp_glu_interleave_size
    if saved.glu_interleave != here:
        # flat states cannot be converted, and weights without states have no iteration
        alone, then = (" --weights-only", " and load that with --finetune") if is_flat else ("", "")
        raise LayoutError(
            f"{where}: --moe-mlp-glu-interleave-size: expected {here} as in this model, got "
            f"{saved.glu_interleave}: rows of fc1 would be swapped, in weights, masters and "
            "moments. Load with the size it was saved with, or change the checkpoint with "
            f"`moe-optim convert {where} NEW --experts grouped --format torch_dist "
            f"--glu-interleave {here or 0}{alone}`{then}."
        )


def require_same_order(optimizer: Any, saved: Any) -> None:
    """Raise LayoutError unless ``saved`` is a manifest with ``optimizer``'s order of experts.

    For states already loaded by bucket, which cannot be rearranged.
    """
    where = "optimizer states"
    if StateManifest.from_dict(saved, where).addresses() != manifest_of(optimizer).addresses():
        raise LayoutError(
            f"{where}: expected experts where this model has them, got a manifest that has them "
            "elsewhere. Load with megatron.core.dist_checkpointing.load, which moe_optim extends."
        )
