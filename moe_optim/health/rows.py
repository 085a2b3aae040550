"""Which expert of which layer each part of a quantized weight is, by names that never change."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from moe_optim.weights.names import modules_by_name, unwrapped_name

_WEIGHT = re.compile(
    r"(?P<above>.*?)layers\.(?P<layer>\d+)\.(?P<inside>.+)\.weight(?P<expert>\d*)$"
)
_EXPERTS = "mlp.experts."
_LOCAL_EXPERT = re.compile(r"local_experts\.(\d+)\.")


@dataclass(frozen=True, slots=True, order=True)
class ExpertName:
    """One expert of one linear, or of a whole layer; a dense weight is its own only expert."""

    layer: str
    """Such as ``layers.3.fc1`` or ``layers.3.experts``, counted from 0 over all stages."""
    expert: int
    """Its number among all experts of the layer, over all ranks."""
    element: str
    """Of its format: ``e4m3`` or ``e2m1``; empty for a whole layer."""


def expert_names(model_chunks: Iterable[Any]) -> dict[torch.nn.Parameter, list[ExpertName]]:
    """Return the names of the experts of every quantized weight that a bucket holds, in order."""
    names = {}
    for chunk in model_chunks:
        modules = modules_by_name(chunk)
        for name, param in chunk.named_parameters():
            storage = getattr(param, "quantized_storage", None)
            if storage is not None and storage.bucket is not None:
                names[param] = _names_of(unwrapped_name(name), storage, modules)
    return names


def _names_of(name: str, storage: Any, modules: dict[str, Any]) -> list[ExpertName]:
    num_experts, element = storage.shape[0], storage.format.element
    found = _WEIGHT.match(name)
    if found is None:
        label = name.removesuffix(".weight")
        return [ExpertName(label, expert, element) for expert in range(num_experts)]
    path = f"{found['above']}layers.{found['layer']}"
    number = getattr(modules.get(path), "layer_number", int(found["layer"]) + 1) - 1
    within, is_expert, inside = found["inside"].rpartition(_EXPERTS)  # a layer may hold another
    local = _LOCAL_EXPERT.match(inside)
    if local is not None:
        inside = inside[local.end() :]
    inside = inside.replace("linear_", "")
    above = found["above"].removeprefix("decoder.")
    first = 0
    if is_expert:
        numbers = getattr(modules.get(f"{path}.{within}mlp"), "local_expert_indices", [0])
        first = numbers[0] + int(local[1] if local else found["expert"] or 0)
    label = f"{above}layers.{number}.{within}{inside}"
    return [ExpertName(label, first + expert, element) for expert in range(num_experts)]


def names_of_all_ranks(mine: Sequence[ExpertName]) -> list[ExpertName]:
    """Return the experts of all ranks, in the order of layers. Every rank must call it."""
    gathered: list[Sequence[ExpertName]] = [()] * dist.get_world_size()
    dist.all_gather_object(gathered, list(mine))
    names = {name for of_rank in gathered for name in of_rank}
    return in_order(names)


def in_order(names: Iterable[ExpertName]) -> list[ExpertName]:
    """Return experts in the order of layers by their numbers, and of their own."""
    return sorted(names, key=lambda name: (_natural(name.layer), name))


def _natural(text: str) -> list[tuple[int, str]]:
    """Return a key by which layers.2 comes before layers.10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]
