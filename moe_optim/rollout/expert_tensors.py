"""Turns the data and scale buffers of an expert linear into tensors for engines."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_optim.errors import ConfigError, LayoutError
from moe_optim.experts.keys.layouts import KeyLayout, KeyPattern, get_layout
from moe_optim.formats import BlockScaledFormat, QuantizedWeight
from moe_optim.formats.reference.nvfp4 import decoding_amax, global_encode_scale
from moe_optim.rollout.conventions import Convention

EXPORT_LAYOUTS = ("hf_per_expert", "sequential", "hf", "grouped")
"""Key layouts of rows-first tensors: one per expert, or stacked over all experts of a layer."""

_CONTIGUOUS = torch.contiguous_format
_NVFP4_UNIT = 6.0 * 448.0  # maximum element times maximum scale


def get_export_layout(name: str) -> KeyLayout:
    """Return a layout that supports export; ConfigError for others."""
    if name not in EXPORT_LAYOUTS:
        raise ConfigError(
            f"layout: expected one of {', '.join(EXPORT_LAYOUTS)}, whose tensors begin with rows, "
            f"got {name!r}. Give one of them."
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


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSplit:
    """How the rows of an expert become those of engines' tensors."""

    parts: int = 1
    """2 to separate gate and up, else 1."""
    interleave: int | None = None
    """Rows per alternating gate and up block; None: not interleaved."""
    is_fused: bool = False
    """Whether one tensor holds all gate rows before all up rows; ``parts`` is 1."""

    def split(self, values: Tensor, block_rows: int = 1) -> Sequence[Tensor]:
        """Return the parts of [E, R / block rows, ...]: views, or copies of interleaved rows."""
        interleave = self.interleave and self.interleave // block_rows
        if self.is_fused and interleave is not None:
            return [torch.cat(list(split_rows(values, 2, interleave)), 1)]
        return split_rows(values, self.parts, interleave)


def export_experts(
    quantized: QuantizedWeight,
    convention: Convention,
    *,
    parts: int = 1,
    interleave: int | None = None,
    name: str = "weight",
) -> list[list[dict[str, Tensor]]]:
    """Return the tensors of each expert and row part, views of those of :func:`stack_experts`.

    Args:
        quantized: weight of the linear; only rowwise buffers are read.
        convention: convention of its format.
        parts: 2 to separate gate and up, else 1.
        interleave: rows per alternating gate and up block; None: not interleaved.
        name: name of the weight, for errors.

    Returns:
        ``parts`` mappings per expert, with data, scale and any global scale or shape. Both halves
            of fc1 have the global scale of their common amax.
    """
    stacked = stack_experts(
        rowwise_of(quantized),
        quantized.format,
        convention,
        RowSplit(parts=parts, interleave=interleave),
        name,
    )
    unbound = [{suffix: one.unbind(0) for suffix, one in part.items()} for part in stacked]
    return [
        [{suffix: tensors[expert] for suffix, tensors in part.items()} for part in unbound]
        for expert in range(quantized.shape[0])
    ]


def rowwise_of(quantized: QuantizedWeight) -> list[Tensor]:
    """Return the buffers that engines read: data, scales and any amaxes of E experts."""
    buffers = quantized.rowwise_data, quantized.rowwise_scale, quantized.global_amax
    return [one for one in buffers if one is not None]


def stack_experts(
    buffers: Sequence[Tensor],
    format: BlockScaledFormat,
    convention: Convention,
    split: RowSplit,
    name: str = "weight",
) -> list[dict[str, Tensor]]:
    """Return the tensors of E experts per row part, under a convention's names, each [E, ...].

    Data and scales are views, except for interleaved rows that come apart and the scales of square
    blocks, which are repeated per row.

    Args:
        buffers: buffers as of :func:`rowwise_of`. May be on ``meta``.
        format: format of the buffers.
        convention: convention of the format.
        split: rows of gate and up in the result.
        name: name of the weight, for errors.

    Raises:
        LayoutError: a scale block spans two parts, or gate and up of fused rows.
    """
    data, scale, *amax = buffers
    experts, rows = data.shape[:2]
    parts, (block_rows, _) = split.parts, convention.scale_block
    _check_cut(rows, 2 if split.is_fused else parts, split.interleave, block_rows, name)
    scale = _repeated(scale, format.rowwise_block[0], block_rows).view(convention.scale_dtype)
    found = {
        convention.data: split.split(data.view(convention.data_dtype)),
        convention.scale: split.split(scale, block_rows),
    }
    if convention.global_scale is not None:  # separate memory per part, as files require
        found[convention.global_scale] = [_global_scales(amax[0], convention) for _ in range(parts)]
    if convention.shape is not None:
        shape = [experts, rows // parts, data.shape[2] * format.elements_per_byte]
        found[convention.shape] = [_shapes(shape, data.device) for _ in range(parts)]
    return [{suffix: tensors[part] for suffix, tensors in found.items()} for part in range(parts)]


def export_expert_of_one_scale(
    codes: Tensor,
    scale_inv: Tensor,
    convention: Convention,
    *,
    parts: int = 1,
    interleave: int | None = None,
) -> list[dict[str, Tensor]]:
    """Return the tensors of an expert with per-tensor scaling, per row part.

    ``codes`` are [R, C] uint8, E4M3; ``scale_inv`` is their factor, [1] fp32. Scales are copies.
    """
    split = RowSplit(parts=parts, interleave=interleave)
    stacked = stack_of_one_scale([codes.unsqueeze(0), scale_inv], convention, split)
    return [{suffix: one[0] for suffix, one in part.items()} for part in stacked]


def stack_of_one_scale(
    buffers: Sequence[Tensor], convention: Convention, split: RowSplit
) -> list[dict[str, Tensor]]:
    """Return the tensors of experts with per-tensor scaling, like :func:`stack_experts`.

    ``buffers`` are codes [E, R, C] uint8, E4M3, and factors [E] fp32. Scales are copies.
    """
    codes, scale_inv = buffers
    experts, rows = codes.shape[:2]
    scales = scale_inv.view(experts, 1, 1).expand(experts, rows // split.parts, 1)
    return [
        {convention.data: part, convention.scale: scales.clone(memory_format=_CONTIGUOUS)}
        for part in split.split(codes.view(convention.data_dtype))
    ]


def split_rows(values: Tensor, parts: int, interleave: int | None) -> Sequence[Tensor]:
    """Return the row parts of [E, R, ...]: views, or copies of interleaved rows."""
    if parts == 1:
        return [values]
    if interleave is None:
        return values.chunk(parts, 1)
    runs = values.view(len(values), -1, parts, interleave, *values.shape[2:])
    return [part.flatten(1, 2) for part in runs.unbind(2)]


def tensor_name(prefix: str, pattern: KeyPattern, expert: int, suffix: str) -> str:
    """Return the full name of an expert's tensor; ``suffix`` replaces ``weight`` or ``bias``."""
    return prefix + tensor_template(pattern, suffix).format(expert=expert)


def tensor_template(pattern: KeyPattern, suffix: str) -> str:
    """Return the name of an expert's tensor in its container, with the placeholder ``{expert}``."""
    module, dot, _ = pattern.template.rpartition(".")
    if dot:
        return f"{module}.{suffix}"
    stem = pattern.template.removesuffix("_bias")  # parameters of one module, as gate_up_proj
    return stem if suffix == "weight" else f"{stem}_{suffix.removeprefix('weight_')}"


def _check_cut(rows: int, parts: int, interleave: int | None, block_rows: int, name: str) -> None:
    run = interleave or rows // parts
    if parts > 1 and run % block_rows:
        what = f"interleaved by {interleave}" if interleave else f"of {run} rows each"
        raise LayoutError(
            f"{name}: expected gate and up in runs of {block_rows} rows or a multiple, the height "
            f"of a block of scales, got them {what}. Export in layout sequential, which keeps them "
            "together, or train with a --moe-ffn-hidden-size that is such a multiple."
        )


def _repeated(scale: Tensor, own_rows: int, block_rows: int) -> Tensor:
    """Return the scales as [E, R / block rows, ...], a view if block heights are equal."""
    if own_rows == block_rows:
        return scale
    row = scale.shape[2] * scale.element_size()
    offset = scale.storage_offset() * scale.element_size()
    is_wide = scale.is_contiguous() and row % 8 == offset % 8 == 0
    words = scale.view(torch.int64) if is_wide else scale  # eight at a time: copies are faster
    return words.repeat_interleave(own_rows // block_rows, 1).view(scale.dtype)


def _shapes(shape: Sequence[int], device: torch.device) -> Tensor:
    """Return the rows and columns of each of E weights, [E, 2] int64."""
    experts, rows, cols = shape
    sizes = torch.empty(experts, 2, dtype=torch.int64, device=device)
    sizes[:, 0], sizes[:, 1] = rows, cols
    return sizes


def _global_scales(amax: Tensor, convention: Convention) -> Tensor:
    """Return the global scales of all experts: decode scales [E], or encode scales [E, 1]."""
    if convention.divides:
        return global_encode_scale(amax.view(-1, 1))
    amax = decoding_amax(amax.view(-1))
    # not `amax / 2688`, which torch may compute by a rounded reciprocal
    return torch.div(amax, torch.full_like(amax, _NVFP4_UNIT))
