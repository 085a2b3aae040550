"""Sharded entries for grouped expert weights that the model saves as one entry per expert."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from torch import Tensor

from moe_optim.weights.names import parameter_names, unwrapped_name


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
