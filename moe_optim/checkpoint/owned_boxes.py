"""Optimizer states by parameter name, saved and loaded as the boxes that each rank owns.

A rank owns a range of a parameter's elements in flat order. Cut along its axes, the range is at
most 2 D - 1 boxes of a parameter of D dimensions: 5 of a weight [E, R, C] of all experts. Where a
model stores a parameter as several tensors (gate and up rows, an entry per expert), boxes are also
cut at their borders. Saved boxes lie within one expert, as Megatron's do, since a reader of a part
of a chunk reads all of it: a rank saves at most 4 chunks more than whole experts, of each tensor.

Each box is a chunk of the tensor that Megatron's ``fully_reshardable`` states have under the same
key, so no rank needs the states of another one. Masters and fp32 moments are saved and loaded in
place; other moments are saved as fp32 copies, made one box at a time.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from math import prod
from operator import add, le, mul
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from torch import Tensor

from moe_optim.checkpoint.boxes import OwnedBox, cut_into_boxes, owned_boxes, with_axes
from moe_optim.checkpoint.flat_states import OwnedRange, flat_states, owned_ranges
from moe_optim.checkpoint.staging import MadeTensor
from moe_optim.errors import LayoutError, listed
from moe_optim.integration.agreement import gather_objects
from moe_optim.weights.names import parameter_names, unwrapped_name

REQUESTS = "moe_optim_requests"
"""Key of the record of requests in a state to load, which no file contains."""


def entries_of(optimizer: Any, model_sharded_state_dict: Any) -> dict[torch.nn.Parameter, Any]:
    """Return the entry of each parameter that ``optimizer`` holds and the model's state has.

    Transformer Engine saves a single grouped weight as one entry per expert (views), in which
    Megatron does not find the parameter itself. Its entry is a factory, which builds those of its
    experts on save and load.
    """
    if not model_sharded_state_dict:
        return {}
    entries = extract_sharded_tensors_and_factories(model_sharded_state_dict)[0]
    by_data = {id(entry.data): entry for entry in nested_values(entries)}
    held = {param for buffer in optimizer.buffers for param in buffer.param_index_map}
    found: dict[torch.nn.Parameter, Any] = {}
    for number, chunk in enumerate(optimizer.model_chunks):
        of_chunk = entries.get(f"model{number}", entries)  # chunks may share names
        by_name = {unwrapped_name(name): entry for name, entry in _named_leaves(of_chunk)}
        for param, name in parameter_names([chunk]).items():
            if id(param) in by_data:
                found[param] = by_data[id(param)]
            elif param in held:
                members = [by_name.get(f"{name}{index}") for index in range(len(param))]
                if all(member is not None for member in members):
                    found[param] = _of_all_members(param, members)
    return {param: entry for param, entry in found.items() if param in held}


def _named_leaves(state: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(state, dict):
        for key, value in state.items():
            yield from _named_leaves(value, str(key))
    elif isinstance(state, list):
        for value in state:
            yield from _named_leaves(value, name)
    else:
        yield name, state


def _of_all_members(param: torch.nn.Parameter, members: list[Any]) -> ShardedTensorFactory:
    shared_key = members[0].key

    def build(key: str, tensor: Tensor, _replica_id: Any, _flattened: Any = None) -> list[Any]:
        prefix = key.removesuffix(shared_key)
        entries = []
        for member, part in zip(members, tensor.unbind(0), strict=True):
            changes = {"key": prefix + member.key, "data": part}
            if isinstance(member, ShardedTensorFactory):
                entries.append(replace(member, **changes).build())
            else:
                entries.append(replace(member, dtype=part.dtype, **changes))
        return entries

    def merge(parts: list[Any]) -> Tensor:
        return torch.stack(
            [
                member.merge_fn(part) if isinstance(member, ShardedTensorFactory) else part
                for member, part in zip(members, parts, strict=True)
            ]
        )

    return ShardedTensorFactory(shared_key, param, build, merge, members[0].replica_id)


def stored_parts(entry: Any, shape: tuple[int, ...]) -> list[OwnedBox]:
    """Return a box for each tensor that a parameter is stored as.

    ``entry`` is the sharded tensor or factory of the parameter in the model's sharded state. A
    factory may store each slice equally often, such as an adapter of all experts for each of them.
    LayoutError if its tensors are not slices of the parameter.
    """
    values = torch.empty(shape, dtype=torch.float32, device="meta")
    if isinstance(entry, ShardedTensorFactory):
        stored = list(nested_values([replace(entry, data=values).build()]))
    else:
        stored = [replace(entry, data=values, dtype=values.dtype)]
    found = []
    for part in stored:
        at, start = part.data.storage_offset(), []
        for stride in values.stride():
            start.append(at // stride)
            at %= stride
        size = (1,) * (len(shape) - part.data.ndim) + tuple(part.data.shape)
        found.append(OwnedBox(part.without_data(), tuple(start), size, part.global_offset))
    is_slice = all(
        part.data.untyped_storage()._cdata == values.untyped_storage()._cdata
        and part.data.stride() == values.stride()[values.ndim - part.data.ndim :]
        for part in stored
    ) and all(all(map(le, map(add, box.start, box.size), shape)) for box in found)
    replicas = {part.replica_id for part in stored}
    if any(not isinstance(replica, tuple) or len(replica) != 3 for replica in replicas):
        raise LayoutError(
            f"{entry.key}: expected a replica_id of pipeline, tensor and data-parallel rank, got "
            f"{replicas}. Give the entry three numbers, as Megatron's own have."
        )
    copies = Counter((box.start, box.size) for box in found)
    numel = sum(prod(size) for _, size in copies)
    if not is_slice or numel != prod(shape) or len({*copies.values()}) > 1:
        raise LayoutError(
            f"{entry.key}: expected tensors that are slices of the parameter {list(shape)}, got "
            f"{', '.join(str(list(part.data.shape)) for part in stored)} with values moved or "
            "missing, whose optimizer states cannot be saved by name. Save without "
            "--dist-ckpt-optim-fully-reshardable."
        )
    return found


def states_to_save(optimizer: Any, model: Any) -> dict[int, dict[str, ShardedTensor]]:
    """Return this rank's part of ``fully_reshardable`` states. No rank communicates.

    Keys, dtypes and global shapes are Megatron's. Masters and fp32 moments are views, other moments
    entries whose fp32 values are made when they are written. ``model`` is the sharded state of the
    optimizer's model chunks; LayoutError if it lacks a parameter, or has one in an unknown form.
    """
    state = {}
    for number, (owned, boxes) in enumerate(_owned(optimizer, model, by_matrix=True)):
        flats = flat_states(optimizer, owned.param)
        state[number] = entries = _entries(optimizer, owned, boxes, flats)
        for name, entry in entries.items():
            kind = name.partition(".")[0]
            if flats[kind].dtype != torch.float32 or kind in optimizer.copied_states:
                entries[name] = _made_later(entry, optimizer, owned.param, kind, flats[kind])
    return state


def _made_later(
    entry: ShardedTensor, optimizer: Any, param: torch.nn.Parameter, kind: str, flat: Tensor
) -> MadeTensor:
    """Return an entry, a view of ``flat``, whose values are read from the state when written."""
    size, strides = entry.data.size(), entry.data.stride()
    start = entry.data.storage_offset() - flat.storage_offset()

    def make() -> Tensor:
        held = flat_states(optimizer, param)[kind].detach()
        values = held.as_strided(size, strides, held.storage_offset() + start)
        return values.to("cpu", torch.float32, copy=True)

    nowhere = torch.empty(size, dtype=torch.float32, device="meta")
    return MadeTensor(**{**vars(entry), "data": nowhere, "dtype": nowhere.dtype}, make=make)


type _Request = tuple[torch.nn.Parameter, dict[str, Tensor], dict[str, Tensor]]
"""A parameter, its states by kind, and the views of them that boxes are loaded into."""


def states_to_load(optimizer: Any, model: Any) -> dict[Any, Any]:
    """Return requests for this rank's states, views of masters and moments.

    ``optimizer`` has allocated states, with any values, which the load replaces. Arguments and
    errors are those of :func:`states_to_save`.
    """
    state: dict[Any, Any] = {}
    requests: list[_Request] = []
    for number, (owned, boxes) in enumerate(_owned(optimizer, model, by_matrix=False)):
        flats = flat_states(optimizer, owned.param)
        first_copies = list({(box.start, box.size): box for box in reversed(boxes)}.values())
        state[number] = entries = _entries(optimizer, owned, first_copies, flats)
        requests.append((owned.param, flats, {name: one.data for name, one in entries.items()}))
        if optimizer.ddp_config.num_distributed_optimizer_instances > 1:  # which exchange boxes
            for entry in entries.values():
                entry.data = entry.data.contiguous()
    return {**state, REQUESTS: LocalNonpersistentObject(tuple(requests))}


def _owned(
    optimizer: Any, model: Any, *, by_matrix: bool
) -> Iterator[tuple[OwnedRange, list[OwnedBox]]]:
    """Yield this rank's ranges with their boxes; raise LayoutError on all ranks of the group."""
    entries = entries_of(optimizer, model)
    names = parameter_names(optimizer.model_chunks)
    held = [param for buffer in optimizer.buffers for param in buffer.param_index_map]
    if missing := [names[param] for param in held if param not in entries]:
        raise LayoutError(
            "optimizer.sharded_state_dict: model_sharded_state_dict: expected an entry for every "
            f"parameter that is trained, got none for {listed(missing)}. Give the sharded state of "
            "all model chunks, as model.sharded_state_dict() returns it; an entry's data is the "
            "parameter itself, also if it is quantized, not its values."
        )
    parts = {param: stored_parts(entries[param], tuple(param.shape)) for param in held}
    for owned in owned_ranges(optimizer):
        shape = tuple(owned.param.shape)
        ranges = cut_into_boxes(owned.start, owned.end, shape, by_matrix=by_matrix)
        yield owned, list(owned_boxes(parts[owned.param], ranges))


def _entries(
    optimizer: Any, owned: OwnedRange, boxes: list[OwnedBox], flats: dict[str, Tensor]
) -> dict[str, ShardedTensor]:
    """Return entries for all boxes of a range, views of ``flats``: kind -> [end - start]."""
    shape = owned.param.shape
    strides = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
    entries = {}
    for kind, flat in flats.items():
        for index, box in enumerate(boxes):
            axes, key = len(box.offset), box.part.key
            at = flat.storage_offset() + sum(map(mul, box.start, strides)) - owned.start
            size = with_axes(box.size, axes, 1)
            view = flat.detach().as_strided(size, with_axes(strides, axes, 1), at)
            entries[f"{kind}.{index}"] = replace(
                box.part,
                key=f"optimizer.state.{optimizer.saved_names.get(kind, kind)}.{key}",
                data=view,
                dtype=view.dtype,
                local_shape=size,
                global_offset=box.offset,
                axis_fragmentations=None,  # chunks of any size
                prepend_axis_num=0,
                # replicas of pipeline and tensor parallelism; those of data parallelism share boxes
                replica_id=(*box.part.replica_id[:2], optimizer.distributed_optimizer_instance_id),
            )
    return entries


@torch.no_grad()
def load_states(optimizer: Any, loaded: dict[Any, Any]) -> None:
    """Take the states loaded for :func:`states_to_load`; raise LayoutError if some are missing."""
    for number, (param, flats, views) in enumerate(loaded[REQUESTS]):
        got = loaded.get(number, {})
        if missing := views.keys() - got.keys():
            name = parameter_names(optimizer.model_chunks)[param]
            raise LayoutError(
                f"optimizer states of {name}: expected all that were requested, got none of "
                f"{listed(sorted(missing))}. Load a checkpoint that has them, or give "
                "--no-load-optim."
            )
        for name, view in views.items():
            if got[name].data_ptr() != view.data_ptr():  # received from another rank
                view.copy_(got[name])
        held = optimizer._get_main_param_and_optimizer_states(param)
        if any([held[kind].data_ptr() != flat.data_ptr() for kind, flat in flats.items()]):
            states = {kind: flat.view(held["param"].shape) for kind, flat in flats.items()}
            optimizer._set_main_param_and_optimizer_states(param, states)


def find_tiling_faults(optimizer: Any) -> list[str]:
    """Return which elements of which parameters no rank owns, or several ranks do.

    Every rank of the data-parallel group must call it; all get the same result.
    """
    held = [param for buffer in optimizer.buffers for param in buffer.param_index_map]
    numbers = {param: number for number, param in enumerate(held)}
    owned = [(numbers[one.param], one.start, one.end) for one in owned_ranges(optimizer)]
    everywhere = gather_objects(owned, optimizer.data_parallel_group)
    ends = [(number, prod(param.shape), 0) for number, param in enumerate(held)]
    names = parameter_names(optimizer.model_chunks)
    faults = []
    reached = [0] * len(held)
    for number, start, end in sorted(chain(*everywhere, ends)):
        if start != reached[number]:
            low, high = sorted((start, reached[number]))
            owners = "no rank" if low == reached[number] else "several ranks"
            faults.append(f"elements {low} to {high} of {names[held[number]]} owned by {owners}")
        reached[number] = max(reached[number], end)
    return faults
