"""Turns the data and scale buffers of an expert linear into tensors for engines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from moe_optim.errors import ConfigError, LayoutError
from moe_optim.experts.keys.layouts import KeyLayout, KeyPattern, get_layout
from moe_optim.formats import QuantizedWeight, get_format
from moe_optim.formats.reference.scales import decoding_amax, global_encode_scale
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
    input_amax: float | None = None,
) -> list[list[dict[str, Tensor]]]:
    """Return the tensors of each expert and row part, views of those of :func:`stack_experts`.

    Args:
        quantized: weight of the linear; only rowwise buffers are read.
        convention: convention of its format.
        parts: 2 to separate gate and up, else 1.
        interleave: rows per alternating gate and up block; None: not interleaved.
        name: name of the weight, for errors.
        input_amax: amax of the inputs of a convention that scales them; None omits the scale.

    Returns:
        ``parts`` mappings per expert, with data, scale and any global scale or shape. Both halves
            of fc1 have the global scale of their common amax.
    """
    split = RowSplit(parts=parts, interleave=interleave)
    buffers, format = rowwise_of(quantized), quantized.format.name
    return each_expert(stack_experts(buffers, format, convention, split, name, input_amax))


def each_expert(stacked: Sequence[Mapping[str, Tensor]]) -> list[list[dict[str, Tensor]]]:
    """Return the tensors of each expert and row part, given stacked ones per row part."""
    of_parts = [
        [
            dict(zip(part, tensors, strict=True))
            for tensors in zip(*(one.unbind(0) for one in part.values()), strict=True)
        ]
        for part in stacked
    ]
    return [list(parts) for parts in zip(*of_parts, strict=True)]


def rowwise_of(quantized: QuantizedWeight) -> list[Tensor]:
    """Return the buffers that engines read: data, scales and any amaxes of E experts."""
    buffers = quantized.rowwise_data, quantized.rowwise_scale, quantized.global_amax
    return [one for one in buffers if one is not None]


def stack_experts(
    buffers: Sequence[Tensor],
    format: str,
    convention: Convention | None,
    split: RowSplit,
    name: str = "weight",
    input_amax: float | None = None,
) -> list[dict[str, Tensor]]:
    """Return the tensors of E experts per row part, under a convention's names, each [E, ...].

    Data and scales are views, except for interleaved rows that come apart, the scales of square
    blocks, which are repeated per row, and those of per-tensor scaling.

    Args:
        buffers: buffers as of :func:`rowwise_of`; codes [E, R, C] uint8 and factors [E] of
            per-tensor scaling; or bf16 weights. May be on ``meta``.
        format: format of the buffers.
        convention: convention of the format; None for bf16.
        split: rows of gate and up in the result.
        name: name of the weight, for errors.
        input_amax: amax of the inputs of a convention that scales them; None omits the scale.

    Raises:
        LayoutError: a scale block spans two parts, or gate and up of fused rows.
    """
    data, *scales = buffers
    if convention is None:
        return [{"weight": part} for part in split.split(data)]
    experts, rows = data.shape[:2]
    parts = split.parts
    found = {convention.data: split.split(data.view(convention.data_dtype))}
    if convention.format == "fp8":  # per-tensor scaling
        factors = scales[0].view(experts, 1, 1).expand(experts, rows // parts, 1)
        found[convention.scale] = [factors.clone(memory_format=_CONTIGUOUS) for _ in range(parts)]
    else:
        block_rows, _ = convention.scale_block
        _check_cut(rows, split, block_rows, name)
        scale = _repeated(scales[0], get_format(format).rowwise_block[0], block_rows)
        found[convention.scale] = split.split(scale.view(convention.scale_dtype), block_rows)
    if convention.global_scale is not None:  # separate memory per part, as files require
        of_parts = [_global_scales(scales[1], convention) for _ in range(parts)]
        found[convention.global_scale] = of_parts
    if convention.input_scale is not None and input_amax is not None:
        amaxes = torch.full((experts,), input_amax, dtype=torch.float32, device=data.device)
        of_parts = [_input_scales(amaxes, convention) for _ in range(parts)]
        found[convention.input_scale] = of_parts
    if convention.shape is not None:
        shape = torch.empty(experts, 2, dtype=torch.int64, device=data.device)
        shape[:, 0] = rows // parts
        shape[:, 1] = data.shape[2] * get_format(format).elements_per_byte
        found[convention.shape] = [shape.clone() for _ in range(parts)]
    return [{suffix: tensors[part] for suffix, tensors in found.items()} for part in range(parts)]


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


def _check_cut(rows: int, split: RowSplit, block_rows: int, name: str) -> None:
    parts, interleave = 2 if split.is_fused else split.parts, split.interleave
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
    for word in (torch.complex128, torch.int64) if scale.is_contiguous() else ():
        if row % word.itemsize == offset % word.itemsize == 0:
            words = scale.view(word)  # wide words: copies are faster
            return words.repeat_interleave(own_rows // block_rows, 1).view(scale.dtype)
    return scale.repeat_interleave(own_rows // block_rows, 1)


def _global_scales(amax: Tensor, convention: Convention) -> Tensor:
    """Return the global scales of all experts: decode scales [E], or encode scales [E, 1]."""
    if convention.divides:
        return global_encode_scale(amax.view(-1, 1))
    return _decode_scales(decoding_amax(amax.view(-1)))


def _input_scales(amax: Tensor, convention: Convention) -> Tensor:
    """Return the scales of inputs: decode scales [E], or encode scales [E, 1].

    The former are ModelOpt's ``amax / 2688``, the latter compressed-tensors' ``2688 / amax``, which
    torch computes by a rounded reciprocal.
    """
    if convention.divides:
        return amax.view(-1, 1).reciprocal() * _NVFP4_UNIT
    return _decode_scales(amax)


def _decode_scales(amax: Tensor) -> Tensor:
    # not `amax / 2688`, which torch may compute by a rounded reciprocal
    return torch.div(amax, _nvfp4_unit(amax.device))


@cache
def _nvfp4_unit(device: torch.device) -> Tensor:
    return torch.full((1,), _NVFP4_UNIT, dtype=torch.float32, device=device)
