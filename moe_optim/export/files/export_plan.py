"""What an export of a checkpoint will do, decided before a value is read or anything is written."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_optim import ops
from moe_optim.checkpoints.conversion.expert_finding import (
    check_row_order,
    find_experts,
    known_interleave,
    without_experts,
)
from moe_optim.checkpoints.conversion.layer_view import LayerView
from moe_optim.checkpoints.files.bounded_json import parse_json
from moe_optim.checkpoints.files.regular_files import read_file
from moe_optim.checkpoints.stores.reader import FLAT_STATES, is_state
from moe_optim.errors import ConfigError, LayoutError, StateError
from moe_optim.expert_keys.conversion import convert_expert_set
from moe_optim.expert_keys.layouts import LINEARS, ExpertSet, KeyLayout, get_layout
from moe_optim.export.conventions import Convention
from moe_optim.export.planes import export_expert, patterns_of, tensor_name
from moe_optim.formats import BlockScaledFormat, QuantizedWeight

MASTERS = "optimizer.state.param."
CONFIG = "config.json"
_GROUPED, _TARGET = get_layout("grouped"), get_layout("hf_per_expert")


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """What a user asks for; None where it follows from the checkpoint."""

    format: BlockScaledFormat
    convention: Convention
    source_layout: KeyLayout | None = None
    source_glu_interleave: int | None = None
    num_experts: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerExperts:
    """The experts of one layer."""

    stored: ExpertSet
    """What is read: masters where there are some, else weights."""
    prefix: str
    """Of their names in the result."""


@dataclass(frozen=True, kw_only=True)
class ExportPlan:
    """What goes where."""

    view: LayerView
    request: ExportRequest
    experts: tuple[LayerExperts, ...]
    dense: tuple[str, ...]
    """Tensors that are kept as they are."""
    config: Mapping[str, Any]
    """Of the model; its ``quantization_config`` is made anew."""
    interleave: int
    """Of the rows that are read."""

    @property
    def reads_masters(self) -> bool:
        """Whether experts are quantized from masters, as training quantizes them."""
        return all(one.stored.prefix.startswith(MASTERS) for one in self.experts)

    @property
    def total_bytes(self) -> int:
        """Bytes of everything that is read."""
        return sum(self.experts_bytes(one) for one in self.experts) + self.view.nbytes(self.dense)

    def experts_bytes(self, experts: LayerExperts) -> int:
        """Return the bytes of one layer's experts, as they are stored."""
        return self.view.nbytes(experts.stored.keys)

    def quantize(self, experts: LayerExperts) -> dict[str, Tensor]:
        """Read the experts of a layer and return their data and scales, expert by expert."""
        tensors = {key: self.view.read(key) for key in experts.stored.keys}
        found: dict[str, Tensor] = {}
        for expert in range(experts.stored.num_experts):
            one = convert_expert_set(
                tensors,
                experts.stored,
                _GROUPED,
                source_interleave=self.interleave or None,
                experts=range(expert, expert + 1),
            )
            for linear in LINEARS:
                found |= self._export(experts, expert, linear, one)
        return found

    def _export(
        self, experts: LayerExperts, expert: int, linear: str, one: Mapping[str, Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of one linear of one expert, [1, R, C] and maybe a bias [1, R]."""
        stem = f"{experts.stored.prefix}{linear}"
        patterns = patterns_of(_TARGET, linear, "weight")
        quantized = ops.quantize(one[f"{stem}.weight"], self.request.format)
        parts = self.exported_parts(quantized, linear)
        for pattern, part in zip(patterns, parts, strict=True):
            for suffix, tensor in part.items():
                yield tensor_name(experts.prefix, pattern, expert, suffix), tensor
        if experts.stored.has_bias:
            biases = patterns_of(_TARGET, linear, "bias")
            rows = one[f"{stem}.bias"][0].bfloat16().chunk(len(biases))
            for pattern, bias in zip(biases, rows, strict=True):
                yield tensor_name(experts.prefix, pattern, expert, "bias"), bias

    def exported_parts(self, quantized: QuantizedWeight, linear: str) -> list[dict[str, Tensor]]:
        """Return data and scales of one expert, [1, R, C], for each part of its rows."""
        parts = len(patterns_of(_TARGET, linear, "weight"))
        return export_expert(quantized, 0, self.request.convention, parts=parts, name=linear)

    def dense_files(self, most: int) -> Iterator[list[str]]:
        """Return what is kept in groups no larger than ``most`` bytes, but for larger tensors."""
        group: list[str] = []
        for key in self.dense:
            if group and self.view.nbytes([*group, key]) > most:
                yield group
                group = []
            group.append(key)
        if group:
            yield group


def plan_export(view: LayerView, request: ExportRequest, config: Path | None = None) -> ExportPlan:
    """Return the plan, without reading a value.

    Args:
        view: of the checkpoint.
        request: what is asked for.
        config: ``config.json`` of the model; None takes that beside the weights.

    Raises:
        ConfigError: there is no configuration, or the request contradicts the checkpoint.
        LayoutError: experts are not complete, or do not fit the format.
    """
    path = view.reader.path
    keys = [key for key in view.tensors if FLAT_STATES not in key]
    sets = find_experts(view, keys, layout=request.source_layout, num_experts=request.num_experts)
    by_prefix = {one.prefix: one for one in sets}
    weights = [one for one in sets if not is_state(one.prefix)]
    if not weights:
        raise LayoutError(
            f"{path}: expected weights of gated experts, got none among {len(keys):,} tensors. "
            "`moe-optim inspect` shows what there is."
        )
    dense = without_experts([key for key in keys if not is_state(key)], sets)
    interleave = known_interleave(view, request.source_glu_interleave)
    check_row_order(view, interleave)
    plan = ExportPlan(
        view=view,
        request=request,
        experts=tuple(
            LayerExperts(stored=by_prefix.get(MASTERS + one.prefix, one), prefix=one.prefix)
            for one in weights
        ),
        dense=dense,
        config=read_config(config or folder_of(path) / CONFIG),
        interleave=interleave,
    )
    _require_fits(plan)
    return plan


def folder_of(path: Path) -> Path:
    """Return the folder of a checkpoint that may be one file."""
    return path if path.is_dir() else path.parent


def read_config(path: Path) -> dict[str, Any]:
    """Return the configuration of a model.

    Raises:
        ConfigError: there is none.
        StateError: it is damaged.
    """
    try:
        config = parse_json(read_file(path.parent, path.name))
        if not isinstance(config, dict):
            raise ValueError("something else than names and values")
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path}: expected the configuration of the model, which engines ask for, got no such "
            "file. Give one with --config."
        ) from error
    except (OSError, ValueError) as error:
        said = error.strerror if isinstance(error, OSError) else error
        raise StateError(f"{path}: expected JSON, got: {said}. Fetch or write it again.") from error
    return config


def _require_fits(plan: ExportPlan) -> None:
    """Raise LayoutError for shapes that the format cannot hold, before anything is read."""
    kinds = {(one.stored.ffn, one.stored.hidden) for one in plan.experts}
    for ffn, hidden in kinds:
        shapes = dict(zip(LINEARS, [(1, 2 * ffn, hidden), (1, hidden, ffn)], strict=True))
        for linear, shape in shapes.items():
            name = f"{plan.view.reader.path}: {linear}"
            empty = QuantizedWeight.empty(
                plan.request.format, shape, device=torch.device("meta"), name=name
            )
            plan.exported_parts(empty, linear)
