"""Splits the data and scale buffers of an expert linear into per-expert tensors for engines."""

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_optim.errors import ConfigError, LayoutError
from moe_optim.experts.keys.layouts import KeyLayout, KeyPattern, get_layout
from moe_optim.formats import QuantizedWeight
from moe_optim.formats.reference.nvfp4 import decoding_amax, global_encode_scale
from moe_optim.rollout.conventions import Convention

EXPORT_LAYOUTS = ("hf_per_expert", "sequential")
"""Key layouts with one rows-first tensor per expert."""

_NVFP4_UNIT = 6.0 * 448.0  # maximum element times maximum scale


def get_export_layout(name: str) -> KeyLayout:
    """Return a layout that supports export; ConfigError for others."""
    if name not in EXPORT_LAYOUTS:
        raise ConfigError(
            f"layout: expected one of {', '.join(EXPORT_LAYOUTS)}, which have a key for each "
            f"expert, got {name!r}. Engines fuse experts while they load them."
        )
    return get_layout(name)


def patterns_of(layout: KeyLayout, linear: str, kind: str) -> tuple[KeyPattern, ...]:
    """Return the patterns of ``linear_fc1`` (gate and up) or ``linear_fc2``, in row order."""
    wanted = ("gate", "up") if linear == "linear_fc1" else ("down",)
    return tuple(
        pattern
        for pattern in layout.patterns
        if pattern.projections[0] in wanted and pattern.is_bias == (kind == "bias")
    )


def export_experts(
    quantized: QuantizedWeight,
    convention: Convention,
    *,
    parts: int = 1,
    interleave: int | None = None,
    name: str = "weight",
) -> list[list[dict[str, Tensor]]]:
    """Return the tensors of each expert and row part, under a convention's names.

    Data and scales are views, except for interleaved rows and the scales of square blocks, which
    are repeated per row.

    Args:
        quantized: weight of the linear; only rowwise buffers are read. May be on ``meta``.
        convention: convention of its format.
        parts: 2 to separate gate and up, else 1.
        interleave: rows per alternating gate and up block; None: not interleaved.
        name: name of the weight, for errors.

    Returns:
        ``parts`` mappings per expert, with data, scale and any global scale or shape. Both halves
            of fc1 have the global scale of their common amax.

    Raises:
        LayoutError: a scale block spans two parts.
    """
    experts, rows, cols = quantized.shape
    block_rows, _ = convention.scale_block
    _check_cut(rows, parts, interleave, block_rows, name)
    data = quantized.rowwise_data.view(convention.data_dtype)
    scale = _repeated(quantized, block_rows).view(convention.scale_dtype)
    buffers = {
        convention.data: split_rows(data, parts, interleave),
        convention.scale: split_rows(scale, parts, interleave and interleave // block_rows),
    }
    if convention.global_scale is not None:  # separate memory per part, as files require
        buffers[convention.global_scale] = [
            _global_scales(quantized, convention) for _ in range(parts)
        ]
    if convention.shape is not None:
        shape = [experts, rows // parts, cols]
        buffers[convention.shape] = [_shapes(shape, data.device) for _ in range(parts)]
    unbound = {name: [part.unbind(0) for part in split] for name, split in buffers.items()}
    return [
        [{name: split[part][expert] for name, split in unbound.items()} for part in range(parts)]
        for expert in range(experts)
    ]


def export_expert_of_one_scale(
    codes: Tensor,
    scale_inv: Tensor,
    convention: Convention,
    *,
    parts: int = 1,
    interleave: int | None = None,
) -> list[dict[str, Tensor]]:
    """Return the tensors of an expert with per-tensor scaling, like :func:`export_experts`.

    ``codes`` are [R, C] uint8, E4M3; ``scale_inv`` is their factor, [1] fp32. Scales are copies.
    """
    data = codes.view(convention.data_dtype).unsqueeze(0)
    rows = codes.shape[0] // parts
    return [
        {convention.data: part[0], convention.scale: scale_inv.expand(rows, 1).clone()}
        for part in split_rows(data, parts, interleave)
    ]


def split_rows(values: Tensor, parts: int, interleave: int | None) -> Sequence[Tensor]:
    """Return the row parts of [E, R, ...]: views, or copies of interleaved rows."""
    if parts == 1 or interleave is None:
        return values.chunk(parts, 1)
    runs = values.view(len(values), -1, parts, interleave, *values.shape[2:])
    return [part.flatten(1, 2) for part in runs.unbind(2)]


def tensor_name(prefix: str, pattern: KeyPattern, expert: int, suffix: str) -> str:
    """Return the full name of an expert's tensor; ``suffix`` replaces ``weight`` or ``bias``."""
    return prefix + tensor_template(pattern, suffix).format(expert=expert)


def tensor_template(pattern: KeyPattern, suffix: str) -> str:
    """Return the name of an expert's tensor in its container, with the placeholder ``{expert}``."""
    return f"{pattern.template.rpartition('.')[0]}.{suffix}"


def _check_cut(rows: int, parts: int, interleave: int | None, block_rows: int, name: str) -> None:
    run = interleave or rows // parts
    if parts > 1 and run % block_rows:
        what = f"interleaved by {interleave}" if interleave else f"of {run} rows each"
        raise LayoutError(
            f"{name}: expected gate and up in runs of {block_rows} rows or a multiple, the height "
            f"of a block of scales, got them {what}. Export in layout sequential, which keeps them "
            "together, or train with a --moe-ffn-hidden-size that is such a multiple."
        )


def _repeated(quantized: QuantizedWeight, block_rows: int) -> Tensor:
    """Return the scales as [E, R / block rows, ...], a view if block heights are equal."""
    scale = quantized.rowwise_scale
    own_rows, _ = quantized.format.rowwise_block
    return scale if own_rows == block_rows else scale.repeat_interleave(own_rows // block_rows, 1)


def _shapes(shape: Sequence[int], device: torch.device) -> Tensor:
    """Return the rows and columns of each of E weights, [E, 2] int64."""
    experts, rows, cols = shape
    sizes = torch.empty(experts, 2, dtype=torch.int64, device=device)
    sizes[:, 0], sizes[:, 1] = rows, cols
    return sizes


def _global_scales(quantized: QuantizedWeight, convention: Convention) -> Tensor:
    """Return the global scales of all experts: decode scales [E], or encode scales [E, 1]."""
    amax = quantized.global_amax
    assert amax is not None, "formats with a global scale have an amax"
    if convention.divides:
        return global_encode_scale(amax.view(-1, 1))
    amax = decoding_amax(amax.view(-1))
    # not `amax / 2688`, which torch may compute by a rounded reciprocal
    return torch.div(amax, torch.full_like(amax, _NVFP4_UNIT))
