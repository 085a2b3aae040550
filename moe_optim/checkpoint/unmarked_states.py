"""Flat states that were saved without a manifest: what lies where is shown, or they are refused.

Sizes leave one of Megatron's orders, seldom more. That it is the right one is seen in the values:
masters that are taken from where it says round to the weights that were saved with them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from torch import Tensor
from torch.nn import Parameter as ModelParameter

from moe_optim.checkpoint.derived_manifest import (
    Parameter,
    StoredBucket,
    StoredBuffer,
    derive_coalesced_manifests,
    derive_manifests,
)
from moe_optim.checkpoint.expert_entries import with_members
from moe_optim.checkpoint.files.torch_dist import TorchDistReader
from moe_optim.checkpoint.flat_states import (
    ManifestRequest,
    chunk_prefixes,
    manifest_of,
    owned_ranges,
    places_of,
    require_same_interleave,
    saved_key,
)
from moe_optim.checkpoint.state_manifest import MANIFEST, CrossReader, Read, StateManifest, listed
from moe_optim.checkpoint.unmarked_files import (
    WEIGHTS_ALONE,
    differing_arguments,
    remedy,
    stored_buffers,
    whole_masters,
)
from moe_optim.errors import LayoutError
from moe_optim.weights.managed import is_managed, storage_of
from moe_optim.weights.names import parameter_names

_CLOSE = 0.25
"""Sum of squares by which quantized weights may differ from their masters, of that of the masters.
Of normally distributed weights it is 0.0007 in 8 bits, 0.012 in NVFP4, 2 for another expert's."""
_WEIGHTS_FIRST = (
    "Load the weights of the same checkpoint first, as Megatron does (with --ckpt-step it takes "
    "states of the latest iteration)"
)
_USUAL_BUCKET = 40_000_000  # elements, of Megatron where reductions overlap


class _NotShownError(Exception):
    """There are no values that show what lies where: why, and what to do."""


@dataclass(frozen=True, slots=True)
class _Values:
    """Masters, and the weights that were saved with them."""

    ranges: Iterable[tuple[ModelParameter, int, int]]
    """What to compare: a parameter, its first element, the one behind the last."""
    master: Callable[[StateManifest, Read], Tensor]
    weight: Callable[[ModelParameter], Tensor]
    """Returns the whole of a parameter; both raise _NotShownError."""
    where: str
    remedy: str
    """What loads the checkpoint if they do not fit."""


def manifest_of_unmarked(
    request: ManifestRequest, stored: TorchDistReader
) -> tuple[str, StateManifest]:
    """Return the manifest that flat states should have been saved with, and a key for it.

    Reads what this rank owns of the masters, and their weights. No rank communicates.

    Raises:
        LayoutError: it is of another model or of other parallel sizes, or does not show what lies
            where.
        StateError: what is read of it is missing or damaged.
    """
    asked, group, where = request.asked, request.group, str(stored.path)
    optimizer = asked.optimizer
    buffers = stored_buffers(stored, group)
    entries = _entries_of(optimizer, asked.model)
    _require_same_tensors(entries, stored)
    chunks = _parameters_of(optimizer)
    interleave = stored.recorded.glu_interleave
    if interleave is None:
        interleave = optimizer.model_chunks[0].config.moe_mlp_glu_interleave_size
    candidates = derive_manifests(chunks, buffers, interleave or None)
    if not candidates:
        raise LayoutError(
            f"{where}: {group}: {_laid_out_otherwise(chunks, buffers)} {remedy(stored, buffers)}"
        )
    values = _Values(
        [(one.param, one.start, one.end) for one in owned_ranges(optimizer)],
        lambda source, read: _read_master(stored, group, source, read),
        lambda param: _read_weight(stored, entries, param),
        where,
        remedy(stored, buffers),
    )
    manifest = _shown(optimizer, candidates, values)
    require_same_interleave(optimizer, manifest, where, is_flat=True)
    return f"{group}.{MANIFEST}.derived", manifest


def manifest_of_unmarked_file(
    optimizer: Any, states: Mapping[Any, Any], where: str
) -> StateManifest:
    """Return the manifest that ``--ckpt-format torch`` should have saved with whole buffers.

    Compares masters with the weights that the model holds: Megatron loads those first. No rank
    communicates.

    Args:
        optimizer: that loads them.
        states: of ``get_parameter_state_dp_zero``: buffer -> dtype -> name -> [elements].
        where: for errors.

    Returns:
        A manifest of whole buffers, each as one bucket.

    Raises:
        LayoutError: they are of other parameters, or do not show what lies where.
    """
    masters = whole_masters(states, where)
    stored = [
        StoredBuffer(dtype=dtype, buckets=(StoredBucket(numel=master.numel()),))
        for dtype, master in masters
    ]
    chunks = _parameters_of(optimizer)
    sizes = dict.fromkeys(chunk.bucket_size for chunk in optimizer.model_chunks)
    interleave = optimizer.model_chunks[0].config.moe_mlp_glu_interleave_size
    candidates = derive_coalesced_manifests(
        chunks, stored, [*sizes, None, _USUAL_BUCKET], interleave
    )
    if not candidates:
        raise LayoutError(
            f"{where}: {_laid_out_otherwise(chunks, stored)} Start with the arguments and parallel "
            f"sizes it was saved with, or {WEIGHTS_ALONE}."
        )
    values = _Values(
        [(param, 0, param.numel()) for param in places_of(optimizer, manifest_of(optimizer))],
        lambda _, read: masters[read.buffer][1][read.start : read.start + read.numel],
        _held_weight,
        where,
        f"{_WEIGHTS_FIRST}; where that was done, {WEIGHTS_ALONE}.",
    )
    return _shown(optimizer, candidates, values)


def holds_several_experts(manifest: StateManifest) -> bool:
    """Return whether there are parameters that Megatron has in several orders."""
    return any(address.expert not in (None, 0) for address in manifest.addresses())


def _shown(optimizer: Any, candidates: Sequence[StateManifest], values: _Values) -> StateManifest:
    """Return the candidate by which every master rounds to its weight."""
    target = manifest_of(optimizer)
    if not holds_several_experts(target):
        return candidates[0]  # Megatron has one order for everything else
    places = places_of(optimizer, target)
    strangers: set[str] = set()
    found: dict[tuple[Read, ...], StateManifest] = {}
    try:
        for candidate in candidates:
            reader = CrossReader(candidate, target, values.where)
            taken = [(one, reader.reads(places[one[0]], *one[1:])) for one in values.ranges]
            wrong = {
                places[one[0]].name
                for one, reads in taken
                if not _belong_together(candidate, reads, one, values)
            }
            strangers |= wrong
            if not wrong:
                found[tuple(read for _, reads in taken for read in reads)] = candidate
    except _NotShownError as error:
        trusts = optimizer.knobs.trust_unmarked_states
        return _trusted(candidates, values.where, *error.args, trusts=trusts)
    if len(found) == 1:
        return next(iter(found.values()))
    got = (
        f"{len(found)} orders in which they do"
        if found
        else f"others at {listed(sorted(strangers))}"
    )
    raise LayoutError(
        f"{values.where}: expected flat optimizer states whose masters round to the weights saved "
        f"with them in one of Megatron's orders of experts, got {got}. {values.remedy}"
    )


def _trusted(
    candidates: Sequence[StateManifest], where: str, reason: str, remedy: str, *, trusts: bool
) -> StateManifest:
    """Return what sizes alone leave, if that is one order and the knob says that it will do."""
    is_single = len(candidates) == 1
    if is_single and trusts:
        return candidates[0]
    knob = (
        " Or set moe_optim.trust_unmarked_states=true to go by the sizes, which fit one order."
        if is_single
        else ""
    )
    raise LayoutError(
        f"{where}: expected weights that show whose the masters are in flat optimizer states "
        f"without a manifest, got none: {reason}. {remedy}{knob}"
    )


def _belong_together(
    source: StateManifest,
    reads: Sequence[Read],
    one: tuple[ModelParameter, int, int],
    values: _Values,
) -> bool:
    """Return whether weights are the masters, rounded; quantized ones, whether they are close."""
    param, start, end = one
    weight = values.weight(param).reshape(-1)[start:end].cpu()
    master = torch.cat([values.master(source, read) for read in reads]).cpu()
    if any(source.buffers[read.buffer].dtype.startswith("(torch.uint8") for read in reads):
        master, weight = master.double(), weight.double()
        return bool((weight - master).square().sum() <= _CLOSE * master.square().sum())
    rounded = master.to(weight.dtype)
    return bool(((rounded == weight) | (rounded.isnan() & weight.isnan())).all())


def _parameters_of(optimizer: Any) -> list[list[Parameter]]:
    """Return the parameters of an optimizer by model chunk, as modules register them."""
    names = parameter_names(optimizer.model_chunks)
    prefixes = chunk_prefixes(optimizer.model_chunks)
    held = {param: buffer for buffer in optimizer.buffers for param in buffer.param_index_map}
    return [
        [
            Parameter(
                name=prefixes.get(param, "") + names[param],
                shape=tuple(param.shape),
                dtype=str(param.dtype),
                is_quantized=held[param].param_dtype == torch.uint8,
                begins_bucket=bool(getattr(param, "shared_embedding", False)),
            )
            for param in chunk.parameters()
            if param in held
        ]
        for chunk in optimizer.model_chunks
    ]


def _entries_of(
    optimizer: Any, model: Any
) -> dict[ModelParameter, ShardedTensor | ShardedTensorFactory]:
    """Return where the model has each parameter of an optimizer saved and loaded."""
    if not model:
        return {}
    entries = extract_sharded_tensors_and_factories(with_members(optimizer, model))[0]
    by_data = {id(entry.data): entry for entry in nested_values(entries)}
    params = (param for buffer in optimizer.buffers for param in buffer.param_index_map)
    return {param: by_data[id(param)] for param in params if id(param) in by_data}


def _parts(entry: ShardedTensor | ShardedTensorFactory, param: ModelParameter) -> Any:
    """Return the tensors, nested, that a parameter is stored as. They hold no values."""
    if isinstance(entry, ShardedTensor):
        return entry
    return replace(entry, data=torch.empty(param.shape, dtype=param.dtype, device="meta")).build()


def _require_same_tensors(
    entries: Mapping[ModelParameter, ShardedTensor | ShardedTensorFactory], stored: TorchDistReader
) -> None:
    """Raise LayoutError if a checkpoint lacks tensors of the model, or has them in other shapes."""
    faults = {}
    for param, entry in entries.items():
        for part in nested_values([_parts(entry, param)]):
            info = stored.tensors.get(part.key)
            if info is None:
                faults[part.key] = f"{part.key} is missing"
            elif info.shape != tuple(part.global_shape):
                shapes = f"{list(info.shape)}, expected {list(part.global_shape)}"
                faults[part.key] = f"{part.key} is {shapes}"
    if faults:
        differing = differing_arguments(stored)
        raise LayoutError(
            f"{stored.path}: expected the tensors of this model, got others: "
            f"{listed(sorted(faults.values()))}. "
            + (
                f"Start with the arguments it was saved with ({listed(differing)})."
                if differing
                else "Load it into the model that it was saved from."
            )
        )


def _read_weight(
    stored: TorchDistReader,
    entries: Mapping[ModelParameter, ShardedTensor | ShardedTensorFactory],
    param: ModelParameter,
) -> Tensor:
    if param not in entries:
        raise _NotShownError(
            "optimizer.sharded_state_dict was called without the sharded state of the model",
            "Give it that.",
        )

    def read(part: ShardedTensor) -> Tensor:
        shape = (*(1,) * part.prepend_axis_num, *part.local_shape)
        return stored.read_box(part.key, part.global_offset, shape).view(part.local_shape)

    entry = entries[param]
    parts = dict_list_map_outplace(read, [_parts(entry, param)])[0]
    return entry.merge_fn(parts) if isinstance(entry, ShardedTensorFactory) else parts


def _read_master(stored: TorchDistReader, group: str, source: StateManifest, read: Read) -> Tensor:
    key = f"{saved_key(group, source, read.buffer, read.bucket)}.param"
    return stored.read_box(key, (read.start,), (read.numel,))


def _held_weight(param: ModelParameter) -> Tensor:
    """Return what a parameter was loaded with."""
    if not is_managed(param):
        return param.detach()
    value = storage_of(param).initial
    if value is None:
        raise _NotShownError(
            "nothing has been loaded into the quantized weights of this model", f"{_WEIGHTS_FIRST}."
        )
    return value


def _laid_out_otherwise(
    chunks: Sequence[Sequence[Parameter]], stored: Sequence[StoredBuffer]
) -> str:
    numel = sum(parameter.numel for chunk in chunks for parameter in chunk)
    saved = ", ".join(
        f"{buffer.numel:,} of {buffer.dtype} in {len(buffer.buckets)} buckets" for buffer in stored
    )
    return (
        f"expected flat optimizer states of {numel:,} elements, laid out as Megatron lays out the "
        f"parameters of this model, got {saved}, laid out otherwise."
    )
