"""Errors that quantizing the experts of a checkpoint would make, as training would report them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from moe_optim import ops
from moe_optim.checkpoint.state_manifest import MASTERS
from moe_optim.commands.console.workers import run_in_workers
from moe_optim.commands.conversion.expert_finding import (
    check_row_order,
    known_interleave,
    refuse_quantized,
    require_experts,
)
from moe_optim.commands.conversion.file_plan import (
    BytesDone,
    convert_experts,
    ranges_of_experts,
    read_experts,
)
from moe_optim.commands.conversion.layer_view import STATE_KIND, LayerView, state_kind
from moe_optim.experts.keys.layouts import LINEARS, ExpertSet, get_layout
from moe_optim.formats import FORMATS
from moe_optim.formats.health_figures import NUM_SUMS, LayerHealth
from moe_optim.formats.reference.health import measure_into

FIGURES = ("error", "saturated", "flushed", "dead_blocks")
"""Figures of a row, shares over all experts of a layer; see ``LayerHealth.of_experts``."""


def sources_of(sets: Sequence[ExpertSet]) -> list[ExpertSet]:
    """Return the masters of all experts, else their weights, which may be quantized values."""
    weights = [one for one in sets if state_kind(one.prefix) is None]
    masters = [one for one in sets if state_kind(one.prefix) in MASTERS]
    has_all = {_stem(one) for one in masters} >= {_stem(one) for one in weights}
    return masters if has_all and masters else weights


def _stem(one: ExpertSet) -> str:
    return STATE_KIND.sub("", one.prefix, count=1)


def measure_errors(
    view: LayerView,
    sets: Sequence[ExpertSet],
    formats: Sequence[str],
    report: BytesDone = lambda _: None,
    *,
    workers: int = 1,
) -> list[dict[str, Any]]:
    """Return a row for each linear of each layer and format; a process holds a few experts.

    ``sets`` are those of :func:`sources_of`. A row has ``prefix``, ``of`` (masters or weights),
    ``linear``, ``format``, :data:`FIGURES`, and ``worst_error`` and ``worst_expert``, those of the
    expert with the largest error.

    Raises:
        LayoutError: there are no experts, some are quantized already, or do not fit a format.
    """
    require_experts(view, sets, len(view.tensors))
    for one in sets:
        refuse_quantized(view, one.keys)
        for name in formats:
            where = f"{view.reader.path}: {one.prefix}"
            for linear, shape in _shapes(one).items():
                FORMATS[name].check_shape(shape, f"{where}{linear}")
    interleave = known_interleave(view, None)
    check_row_order(view, interleave)
    found: dict[str, list[dict[str, Any]]] = {}
    shared = view, tuple(formats), interleave
    for one, rows in run_in_workers(_measure, shared, sets, workers=workers):
        found[one.prefix] = rows
        report(view.nbytes(one.keys))
    return [row for one in sets for row in found[one.prefix]]


def _shapes(one: ExpertSet) -> dict[str, tuple[int, int, int]]:
    count, fc1, fc2 = one.num_experts, (2 * one.ffn, one.hidden), (one.hidden, one.ffn)
    return {"linear_fc1": (count, *fc1), "linear_fc2": (count, *fc2)}


def _measure(
    shared: tuple[LayerView, tuple[str, ...], int], one: ExpertSet
) -> list[dict[str, Any]]:
    view, formats, interleave = shared
    keys = [(linear, name) for linear in LINEARS for name in formats]
    count, cpu = one.num_experts, torch.device("cpu")
    sums = {key: torch.zeros(count, NUM_SUMS, dtype=torch.float64, device=cpu) for key in keys}
    amaxes = {key: torch.zeros(count, dtype=torch.float32, device=cpu) for key in keys}
    target = replace(one, layout=get_layout("grouped"))
    for experts in ranges_of_experts([(view, one)], view.nbytes(one.keys)):
        tensors = convert_experts(
            read_experts(view, one, experts),
            experts,
            source=one,
            target=target,
            rows=(interleave, interleave),
        )
        for linear, name in keys:
            for expert, weight in zip(
                experts, tensors[f"{one.prefix}{linear}.weight"], strict=True
            ):
                quantized = ops.quantize(weight.float()[None], name)
                place = slice(expert, expert + 1)
                key = linear, name
                measure_into(sums[key][place], amaxes[key][place], weight.float(), 0, quantized)
    return [
        _row(one, linear, name, sums[linear, name], amaxes[linear, name]) for linear, name in keys
    ]


def _row(
    one: ExpertSet, linear: str, name: str, sums: torch.Tensor, amaxes: torch.Tensor
) -> dict[str, Any]:
    health = LayerHealth(
        layer=one.prefix,
        format=name,
        experts=tuple(range(one.num_experts)),
        amax=amaxes.double(),
        sums=sums,
    )
    errors = health.of_experts()["error"]
    is_zero = errors.isnan() & sums.isfinite().all(1)
    worst = int(errors.nan_to_num(torch.inf).masked_fill(is_zero, -1.0).argmax())
    figures = health.of_layer()
    return {
        "prefix": _stem(one),
        "of": "weights" if state_kind(one.prefix) is None else "masters",
        "linear": linear,
        "format": name,
        **{figure: figures[figure] for figure in FIGURES},
        "worst_error": float(errors[worst]),
        "worst_expert": worst,
    }
