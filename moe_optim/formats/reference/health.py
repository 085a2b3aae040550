"""Health sums of experts, computed from any range of a weight."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_optim.formats import BlockScaledFormat, QuantizedWeight
from moe_optim.formats.health_figures import SKETCH, Sum, signs
from moe_optim.formats.reference.blocks import as_magnitude, cut_experts, magnitude_bits
from moe_optim.formats.reference.codes import decode_e4m3, decode_e8m0
from moe_optim.formats.reference.dequantizing import dequantize
from moe_optim.formats.reference.scales import decoding_amax


@torch.no_grad()
def measure_into(
    sums: Tensor, amaxes: Tensor, source: Tensor, start: int, q: QuantizedWeight
) -> None:
    """Add the sums of a range of a weight to those of its experts, and raise their amaxes.

    Args:
        sums: [E, NUM_SUMS] fp64, updated in place; columns are those of :class:`Sum`, then the
            sketch: entry ``column % SKETCH`` is the sum of its elements times their signs.
        amaxes: [E] fp32, updated in place.
        source: fp32 or bf16, the unquantized elements of the weight from ``start`` on. Rounded to
            bf16 first.
        start: first element of the source, counted in the weight.
        q: all buffers of the whole weight; only rowwise values are measured.
    """
    _, rows, cols = q.shape
    for expert, place, values in cut_experts(source, start, rows * cols):
        weight = values.bfloat16()
        sums[expert] += _measure(weight, place, _expert_of(q, expert))
        amax = as_magnitude(magnitude_bits(weight).max())
        amaxes[expert] = torch.maximum(amaxes[expert], amax)


def _measure(rounded: Tensor, place: slice, q: QuantizedWeight) -> Tensor:
    """Return the sums of elements ``place`` of one bf16 expert, the only one in ``q``."""
    _, rows, cols = q.shape
    values = dequantize(q)[0]
    value, weight = values.view(-1)[place], rounded.float()
    saturated = _is_above(weight.abs(), _limits(q).view(-1)[place], q.format) & (value != 0)
    flushed = (weight != 0) & (value == 0)
    height, width = q.format.rowwise_block
    owned = torch.zeros(rows * cols, dtype=torch.bool, device=rounded.device)
    owned[place] = True
    owned_blocks = owned.view(rows, cols)[::height, ::width]
    padded = pad(values != 0, (0, -cols % width, 0, -rows % height))
    alive = padded.view(-1, height, padded.shape[1] // width, width).any(3).any(1)
    wide = weight.double()
    lanes = torch.zeros(SKETCH, dtype=torch.float64, device=rounded.device)
    columns = torch.arange(place.start, place.stop, device=rounded.device) % cols % SKETCH
    lanes.index_add_(0, columns, wide * signs(place.start, place.stop, rounded.device))
    found = {
        Sum.SQUARES: wide.square().sum(),
        Sum.ERRORS: (value.double() - wide).square().sum(),
        Sum.ELEMENTS: torch.tensor(weight.numel(), dtype=torch.int64, device=weight.device),
        Sum.SATURATED: saturated.sum(),
        Sum.FLUSHED: flushed.sum(),
        Sum.BLOCKS: owned_blocks.sum(),
        Sum.DEAD: (owned_blocks & ~alive).sum(),
    }
    return torch.cat(
        [torch.stack([found[column].double().to(lanes.device) for column in Sum]), lanes]
    )


def _limits(q: QuantizedWeight) -> Tensor:
    """Return the fp32 limit of every element [R, C] for :func:`_is_above`.

    The largest magnitude of a block is ``data_max`` times its scale, and half a step more for INT4,
    whose stored scale may be rounded down. An fp32 scale may be an ulp short of the inverse of its
    factor, which rounding to bf16 undoes. For NVFP4, ``S_dec * G / 448`` would round; the
    equivalent ``1.75 w > S_dec / 256 * G`` has exact products.
    """
    scale = q.rowwise_scale[0]
    if q.global_amax is not None:
        limit = (decode_e4m3(scale) / 256.0) * decoding_amax(q.global_amax)
    elif q.format.scale_encoding == "e8m0":
        limit = decode_e8m0(scale).float() * q.format.data_max
    elif q.format.scale_encoding == "bf16":
        limit = scale.float() * (q.format.data_max + 0.5)
    else:
        limit = (scale * q.format.data_max).bfloat16().float()
    height, width = q.format.rowwise_block
    wide = limit.repeat_interleave(height, 0).repeat_interleave(width, 1)
    return wide[: q.shape[1], : q.shape[2]].contiguous()


def _is_above(magnitude: Tensor, limit: Tensor, format: BlockScaledFormat) -> Tensor:
    return (magnitude * 1.75 if format.has_global_amax else magnitude) > limit


def _expert_of(q: QuantizedWeight, expert: int) -> QuantizedWeight:
    buffers = (buffer[expert : expert + 1] for buffer in q.buffers().values())
    return QuantizedWeight.of_buffers(q.format, (1, *q.shape[1:]), buffers)
