"""Assignment of experts to rows of measurements, by stable names."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_optim.integration.agreement import gather_objects
from moe_optim.weights.names import modules_by_name, unwrapped_name

_WEIGHT = re.compile(
    r"(?P<above>.*?)layers\.(?P<layer>\d+)\.(?P<inside>.+)\.weight(?P<expert>\d*)$"
)
_EXPERTS = "mlp.experts."
_LOCAL_EXPERT = re.compile(r"local_experts\.(\d+)\.")


@dataclass(frozen=True, slots=True, order=True)
class ExpertName:
    """One expert of one linear, or of a whole layer; a dense weight counts as one expert."""

    layer: str  # name such as layers.3.fc1 or layers.3.experts, with global layer numbers from 0
    expert: int  # global expert id in the layer
    format: str  # name of its format; empty for a whole layer


class ExpertRows:
    """Rows sorted by layer, in numeric order, then by expert."""

    def __init__(self, names: Iterable[ExpertName]) -> None:
        self.names = sorted(set(names), key=lambda name: (_numbers_and_texts(name.layer), name))
        self._row_of = {name: row for row, name in enumerate(self.names)}

    @classmethod
    def of_all_ranks(cls, mine: Iterable[ExpertName]) -> "ExpertRows":
        """Return the rows of the experts of all ranks. Every rank must call it, with its own."""
        gathered = gather_objects(list(mine), None)
        return cls(name for of_rank in gathered for name in of_rank)

    def of(self, names: Sequence[ExpertName]) -> Tensor:
        """Return the rows of experts, int64 on the CPU."""
        rows = [self._row_of[name] for name in names]
        return torch.tensor(rows, dtype=torch.int64, device="cpu")

    def by_layer(self, measured: Tensor) -> dict[tuple[str, str], list[int]]:
        """Return (layer, format) -> rows of its measured experts, if any.

        ``measured`` is [rows] bool on the CPU.
        """
        rows: dict[tuple[str, str], list[int]] = {}
        for row in measured.nonzero().flatten().tolist():
            rows.setdefault((self.names[row].layer, self.names[row].format), []).append(row)
        return rows


def expert_names(model_chunks: Iterable[Any]) -> dict[torch.nn.Parameter, list[ExpertName]]:
    """Return the expert names of every bucketed quantized weight, in order."""
    names = {}
    for chunk in model_chunks:
        modules = modules_by_name(chunk)
        for name, param in chunk.named_parameters():
            storage = getattr(param, "quantized_storage", None)
            if storage is not None and storage.bucket is not None:
                names[param] = _names_of(unwrapped_name(name), storage, modules)
    return names


def _names_of(name: str, storage: Any, modules: dict[str, Any]) -> list[ExpertName]:
    num_experts, format = storage.shape[0], storage.format.name
    found = _WEIGHT.match(name)
    if found is None:
        label = name.removesuffix(".weight")
        return [ExpertName(label, expert, format) for expert in range(num_experts)]
    path = f"{found['above']}layers.{found['layer']}"
    number = getattr(modules.get(path), "layer_number", int(found["layer"]) + 1) - 1
    within, is_expert, inside = found["inside"].rpartition(_EXPERTS)  # layers may be nested
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
    return [ExpertName(label, first + expert, format) for expert in range(num_experts)]


def _numbers_and_texts(layer: str) -> list[tuple[int, str]]:
    parts = re.split(r"(\d+)", layer)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]
