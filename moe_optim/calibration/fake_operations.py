"""Operations of fake quantization: kernels where they run, else plain torch."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from moe_optim.formats import get_format
from moe_optim.formats.reference import fake as reference
from moe_optim.kernels.fake import find_table
from moe_optim.kernels.plan import takes_kernels
from moe_optim.library import in_graphs


def cut_like(flat: Tensor, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return views of concatenated values, of the shapes of ``like``."""
    shapes = [one.shape for one in like]
    if all(shape == shapes[0] for shape in shapes):  # one call, since views cost host time
        return flat.view(len(like), *shapes[0]).unbind(0)
    parts = flat.split([one.numel() for one in like])
    return tuple(part.view(shape) for part, shape in zip(parts, shapes, strict=True))


def _empty(values: Sequence[Tensor], *_: object, dtype: torch.dtype | None = None) -> Tensor:
    return values[0].new_empty(sum(one.numel() for one in values), dtype=dtype)


_empty_bf16 = partial(_empty, dtype=torch.bfloat16)


@in_graphs(fake=_empty, name="fake_quantize", replays=True)
def fake_quantized(
    values: Sequence[Tensor], amax: Tensor, bits: int | None, narrow_range: bool, backend: str
) -> Tensor:
    """Return the values of all experts, concatenated in one allocation.

    ``values`` are contiguous tensors of one dtype on one device, [E, R, C], or [R, C] for one
    expert; ``amax`` is [experts], or [1] for all experts.
    """
    result = _empty(values)
    if result.numel() and takes_kernels(backend, values[0].device, e4m3=bits is None):
        codes = reference.code_range(bits, narrow_range)
        find_table(values).launch_values(amax, result, codes, e4m3=bits is None)
        return result
    for part, one, own in zip(
        cut_like(result, values), values, _amax_of(values, amax), strict=True
    ):
        part.copy_(reference.fake_quantize(one, own, bits, narrow_range=narrow_range))
    return result


@in_graphs(fake=_empty, name="clip_gradient", replays=True)
def clipped_gradient(
    values: Sequence[Tensor], amax: Tensor, gradients: Sequence[Tensor], backend: str
) -> Tensor:
    """Return the gradients of all experts, concatenated, zero where a value is clipped.

    ``values`` and ``amax`` are those of :func:`fake_quantized`; ``gradients`` match ``values``.
    """
    result = _empty(values)
    if result.numel() and takes_kernels(backend, values[0].device, e4m3=False):
        find_table(values, gradients).launch_gradients(amax, result)
        return result
    parts = zip(cut_like(result, values), values, _amax_of(values, amax), gradients, strict=True)
    for part, one, own, gradient in parts:
        part.copy_(reference.clip_gradient(one, own, gradient))
    return result


def zero_clipped(
    values: Sequence[Tensor], amax: Tensor, gradients: Sequence[Tensor], backend: str
) -> None:
    """Zero gradients in place where a value is clipped, as :func:`clipped_gradient` would.

    ``values`` are contiguous experts [R, C], ``amax`` is that of :func:`fake_quantized`;
    ``gradients`` match ``values`` and have one dtype, which may be another.
    """
    fits = values[0].dtype == torch.bfloat16 and all(one.is_contiguous() for one in gradients)
    has_any = any(one.numel() for one in values)
    if fits and has_any and takes_kernels(backend, values[0].device, e4m3=False):
        find_table(values, gradients).launch_zeros(amax, gradients[0])
        return
    for one, own, gradient in zip(values, _amax_of(values, amax), gradients, strict=True):
        gradient.copy_(reference.clip_gradient(one, own, gradient))


def _amax_of(values: Sequence[Tensor], amax: Tensor) -> list[Tensor]:
    if amax.numel() == 1:
        return [amax.view(())] * len(values)
    counts = [count_experts(one) for one in values]
    shapes = [(-1, 1, 1) if one.dim() == 3 else () for one in values]
    return [part.view(shape) for part, shape in zip(amax.split(counts), shapes, strict=True)]


def count_experts(values: Tensor) -> int:
    """Return the number of experts of a tensor [E, R, C] or [R, C]."""
    return values.shape[0] if values.dim() == 3 else 1


@in_graphs(fake=_empty_bf16, replays=True)
def fake_blocks(values: Sequence[Tensor], format: str, backend: str) -> Tensor:
    """Return the bf16 values of all experts in a row-only ``format``, concatenated.

    ``values`` are those of :func:`fake_quantized`, in fp32 or bf16, of shapes that fit the format.
    """
    result, described = _empty_bf16(values), get_format(format)
    e4m3 = "e4m3" in (described.element, described.scale_encoding)
    if result.numel() and takes_kernels(backend, result.device, e4m3=e4m3):
        find_table(values).launch_blocks(described, values[0].dtype, result)
        return result
    for part, one in zip(cut_like(result, values), values, strict=True):
        whole = one if one.dim() == 3 else one.unsqueeze(0)
        part.copy_(reference.fake_quantize_blocks(whole, described).view(part.shape))
    return result
