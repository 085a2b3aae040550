"""Flat states saved without a manifest: their order is derived from values, or refused.

Sizes usually leave one of Megatron's expert orders. Values identify the right one: its masters
round to the weights saved with them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor
from torch.nn import Parameter as ModelParameter

from moe_optim.checkpoint.derived_manifest import (
    Chunks,
    Parameter,
    StoredBucket,
    StoredBuffer,
    derive_manifests,
    lower_bits_of_masters,
    read_buffers,
)
from moe_optim.checkpoint.files.torch_dist import TorchDistReader
from moe_optim.checkpoint.flat_states import (
    ManifestRequest,
    manifest_names,
    manifest_of,
    owned_ranges,
    places_of,
    require_same_interleave,
    saved_key,
)
from moe_optim.checkpoint.load_session import (
    differing_arguments,
    require_same_tensors,
    stored_tensors,
)
from moe_optim.checkpoint.owned_boxes import entries_of
from moe_optim.checkpoint.state_manifest import (
    MANIFEST,
    BucketSpan,
    LayoutMap,
    StateManifest,
    flat_groups,
)
from moe_optim.errors import LayoutError, listed
from moe_optim.weights.managed import is_managed, storage_of

_CLOSE = 0.25
"""Largest accepted ratio |weight - master|^2 / |master|^2 for quantized weights. For normally
distributed weights it is 0.0007 in 8 bits, 0.012 in NVFP4, and 2 for another expert's weights."""
_USUAL_BUCKET = 40_000_000  # elements; Megatron's default with overlapped reductions
_WEIGHTS_ALONE = "load only the weights (--no-load-optim)"
_RESHARDABLE = "--dist-ckpt-optim-fully-reshardable"
_WEIGHTS_FIRST = "Load the weights of the same checkpoint first, as Megatron does"
_NO_MODEL = (
    "optimizer.sharded_state_dict was called without the sharded state of the model. Give it that."
)
_NOTHING_LOADED = (
    f"nothing has been loaded into the quantized weights of this model. {_WEIGHTS_FIRST}."
)


@dataclass(frozen=True, slots=True)
class _Values:
    """Masters, and the weights saved with them."""

    ranges: Sequence[tuple[ModelParameter, int, int]]
    """Parameters to compare, with start and end element."""
    master: Callable[[StateManifest, BucketSpan], Tensor]
    weight: Callable[[ModelParameter], Any]
    """Returns the whole weight, a tensor."""
    lacks: str
    """Reason why there are no weights to compare with, and a remedy; empty if there are."""
    where: str
    remedy: str
    """Advice for a mismatch."""


def manifest_of_groups_states(
    request: ManifestRequest, stored: TorchDistReader
) -> tuple[str, StateManifest]:
    """Derive the manifest of a group's states; return it with its key.

    Reads this rank's masters and their weights. No rank communicates.

    Raises:
        LayoutError: model or parallel sizes differ, or the values fit no order.
        StateError: data to read is missing or damaged.
    """
    requester, group, where = request.requester, request.group, str(stored.path)
    optimizer = requester.optimizer
    buffers = stored_buffers(stored, group)
    entries = entries_of(optimizer, requester.model)
    require_same_tensors(entries.values(), stored)
    chunks = _parameters_of(optimizer)
    interleave = stored.recorded.glu_interleave
    if interleave is None:
        interleave = optimizer.model_chunks[0].config.moe_mlp_glu_interleave_size
    candidates = derive_manifests(chunks, buffers, interleave or None)
    remedy = _remedy(stored, buffers)
    if not candidates:
        raise LayoutError(f"{where}: {group}: {_laid_out_otherwise(chunks, buffers)} {remedy}")

    def read_master(source: StateManifest, span: BucketSpan) -> Tensor:
        key = f"{saved_key(group, source, span)}.param"
        return stored.read_box(key, (span.start,), (span.numel,))

    ranges = [(one.param, one.start, one.end) for one in owned_ranges(optimizer)]
    lacks = any(param not in entries for param, *_ in ranges)
    values = _Values(
        ranges,
        read_master,
        lambda param: _read_weight(stored, entries[param]),
        _NO_MODEL if lacks else "",
        where,
        remedy,
    )
    manifest = _choose(optimizer, candidates, values)
    require_same_interleave(optimizer, manifest, where, is_flat=True)
    return f"{group}.{MANIFEST}.derived", manifest


def manifest_of_file_states(optimizer: Any, states: Mapping[Any, Any], where: str) -> StateManifest:
    """Derive the manifest of ``--ckpt-format torch`` states, with one bucket per buffer.

    Compares masters with the model's weights, which Megatron loads first. ``states`` are as in
    :func:`rearranged_states`. No rank communicates. LayoutError if states have other parameters, or
    their values fit no order.
    """
    masters = _whole_masters(states, where)
    stored = [
        StoredBuffer(dtype=dtype, buckets=(StoredBucket(numel=master.numel()),))
        for dtype, master in masters
    ]
    chunks = _parameters_of(optimizer)
    sizes = dict.fromkeys(chunk.bucket_size for chunk in optimizer.model_chunks)
    interleave = optimizer.model_chunks[0].config.moe_mlp_glu_interleave_size
    candidates = derive_manifests(
        chunks, stored, interleave, bucket_sizes=[*sizes, None, _USUAL_BUCKET]
    )
    if not candidates:
        raise LayoutError(
            f"{where}: {_laid_out_otherwise(chunks, stored)} Start with the arguments and parallel "
            f"sizes it was saved with, or {_WEIGHTS_ALONE}."
        )
    ranges = [(param, 0, param.numel()) for param in places_of(optimizer)]
    weights = {param: _held_weight(param) for param, *_ in ranges}
    lacks = any(weight is None for weight in weights.values())
    values = _Values(
        ranges,
        lambda _, span: masters[span.buffer][1][span.start : span.end],
        weights.__getitem__,
        _NOTHING_LOADED if lacks else "",
        where,
        f"{_WEIGHTS_FIRST}; where that was done, {_WEIGHTS_ALONE}.",
    )
    return _choose(optimizer, candidates, values)


def stored_buffers(stored: TorchDistReader, group: str) -> list[StoredBuffer]:
    """Return the buffers of a data-parallel group as described by ``.metadata``.

    LayoutError if the checkpoint has no states of this group, or only partial masters.
    """
    if (key := lower_bits_of_masters(stored, group)) is not None:
        raise LayoutError(
            f"{stored.path}: {key}: expected whole masters, got {stored.tensors[key].dtype}: their "
            "lower bits, as --use-precision-aware-optimizer keeps them beside the weights. "
            f"{_WEIGHTS_ALONE.capitalize()}."
        )
    if found := read_buffers(stored, group):
        return found
    groups, differing = flat_groups(stored.tensors), differing_arguments(stored.arguments)
    raise LayoutError(
        f"{stored.path}: expected flat optimizer states of {group}, got "
        f"{f'those of {listed(groups)}' if groups else 'none'}. Load with the tensor, pipeline "
        "and expert parallel sizes they were saved with"
        f"{f' ({listed(differing)})' if differing else ''}: what is saved from there with "
        f"{_RESHARDABLE} loads at any sizes. Or {_WEIGHTS_ALONE}."
    )


def _choose(optimizer: Any, candidates: Sequence[StateManifest], values: _Values) -> StateManifest:
    """Return the candidate by which every master rounds to its weight.

    Without weights, the only candidate if the configuration trusts sizes.
    """
    target = manifest_of(optimizer)
    if not target.holds_several_experts():
        return candidates[0]  # other parameters have only one order
    if values.lacks:
        is_single = len(candidates) == 1
        if is_single and optimizer.moe_optim_config.trust_unmarked_states:
            return candidates[0]
        knob = (
            " Or set moe_optim.trust_unmarked_states=true to go by the sizes, which fit one order."
        )
        raise LayoutError(
            f"{values.where}: expected weights to compare with the masters of flat optimizer "
            f"states without a manifest, got none: {values.lacks}{knob if is_single else ''}"
        )
    places = places_of(optimizer)
    orders: dict[tuple[BucketSpan, ...], StateManifest] = {}
    """Candidates by the spans of the compared ranges; some differ only in other ranges."""
    wrong: set[str] = set()
    for candidate in candidates:
        layouts = LayoutMap(candidate, target, values.where)
        taken = [(one, layouts.spans(places[one[0]], *one[1:])) for one in values.ranges]
        strangers = {
            places[one[0]].name
            for one, spans in taken
            if not _belong_together(candidate, spans, one, values)
        }
        wrong |= strangers
        if not strangers:
            orders.setdefault(tuple(span for _, spans in taken for span in spans), candidate)
    if len(orders) == 1:
        return next(iter(orders.values()))
    got = (
        f"{len(orders)} orders in which they do" if orders else f"others at {listed(sorted(wrong))}"
    )
    raise LayoutError(
        f"{values.where}: expected flat optimizer states whose masters round to the weights saved "
        f"with them in one of Megatron's orders of experts, got {got}. {values.remedy}"
    )


def _belong_together(
    source: StateManifest,
    spans: Sequence[BucketSpan],
    one: tuple[ModelParameter, int, int],
    values: _Values,
) -> bool:
    """Return whether masters round to the weights, or are close to quantized ones."""
    param, start, end = one
    weight = values.weight(param).reshape(-1)[start:end].cpu()
    master = torch.cat([values.master(source, span) for span in spans]).cpu()
    if any(source.buffers[span.buffer].dtype.startswith("(torch.uint8") for span in spans):
        master, weight = master.double(), weight.double()
        return bool((weight - master).square().sum() <= _CLOSE * master.square().sum())
    rounded = master.to(weight.dtype)
    return bool(((rounded == weight) | (rounded.isnan() & weight.isnan())).all())


def _parameters_of(optimizer: Any) -> list[list[Parameter]]:
    names = manifest_names(optimizer.model_chunks)
    held = {param: buffer for buffer in optimizer.buffers for param in buffer.param_index_map}
    return [
        [
            Parameter(
                name=names[param],
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


def _read_weight(stored: TorchDistReader, entry: Any) -> Tensor:
    def read(part: ShardedTensor) -> Tensor:
        shape = (*(1,) * part.prepend_axis_num, *part.local_shape)
        return stored.read_box(part.key, part.global_offset, shape).view(part.local_shape)

    parts = dict_list_map_outplace(read, [stored_tensors(entry)])[0]
    return entry.merge_fn(parts) if isinstance(entry, ShardedTensorFactory) else parts


def _held_weight(param: ModelParameter) -> Tensor | None:
    """Return the value of a weight; None if nothing was loaded into a quantized one."""
    return storage_of(param).initial if is_managed(param) else param.detach()


def _whole_masters(states: Mapping[Any, Any], where: str) -> list[tuple[str, Tensor]]:
    """Return dtype and masters [elements] of each buffer of a legacy state."""
    found = []
    for number in sorted(key for key in states if isinstance(key, int)):
        ((dtype, tensors),) = states[number].items()
        if not isinstance(tensors["param"], Tensor):
            raise LayoutError(
                f"{where}: expected one tensor per state and buffer, got one per bucket, as "
                f"Megatron saved before February 2024, in another order. "
                f"{_WEIGHTS_ALONE.capitalize()}."
            )
        found.append((str(dtype), tensors["param"]))
    return found


def _laid_out_otherwise(chunks: Chunks, stored: Sequence[StoredBuffer]) -> str:
    numel = sum(parameter.numel for chunk in chunks for parameter in chunk)
    saved = ", ".join(
        f"{buffer.numel:,} of {buffer.dtype} in {len(buffer.buckets)} buckets" for buffer in stored
    )
    return (
        f"expected flat optimizer states of {numel:,} elements, laid out as Megatron lays out the "
        f"parameters of this model, got {saved}, laid out otherwise."
    )


def _remedy(stored: TorchDistReader, buffers: Sequence[StoredBuffer]) -> str:
    if differing := differing_arguments(stored.arguments):
        return (
            f"Start with the arguments it was saved with ({listed(differing)}), or "
            f"{_WEIGHTS_ALONE}."
        )
    before_others = (bucket for buffer in buffers for bucket in buffer.buckets[:-1])
    if (  # Megatron 0.19 saves such states by name with wrong offsets, or not at all
        any(bucket.padded != bucket.numel for bucket in before_others)
        or stored.arguments.get("moe_single_grouped_weight")
    ):
        return f"{_WEIGHTS_ALONE.capitalize()}."
    return (
        f"Load it in the program that wrote it and save it with {_RESHARDABLE}, or "
        f"{_WEIGHTS_ALONE}."
    )
