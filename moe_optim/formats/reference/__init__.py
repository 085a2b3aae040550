"""Plain-torch definition of every format: the oracle of all kernels, and the CPU backend."""

import torch
from torch import Tensor

from moe_optim.errors import LayoutError
from moe_optim.formats import BlockScaledFormat, QuantizedWeight, get_format
from moe_optim.formats.reference.blocks import derive_into, expand_scale_into, quantize_blocks_into
from moe_optim.formats.reference.dequantizing import dequantize, dequantize_bf16
from moe_optim.library import in_graphs

__all__ = [
    "dequantize",
    "dequantize_bf16",
    "derive_into",
    "expand_scale_into",
    "quantize",
    "quantize_into",
    "quantize_gathered_into",
]


def quantize(master: Tensor, format: BlockScaledFormat, *, name: str = "weight") -> QuantizedWeight:
    """Return ``master`` quantized to ``format``, in new memory. Defines the bytes of the format.

    Args:
        master: [E, R, C] fp32 or bf16, any strides. fp32 is rounded to bf16 first, as in TE 2.20
            quantize_master_weights. Experts are independent.
        format: one of ``moe_optim.formats.FORMATS``.
        name: name of the weight, for errors.

    Raises:
        LayoutError: wrong dtype, or unsupported shape.
    """
    buffers = _reference_quantize(master.detach(), format.name, name)
    return QuantizedWeight.of_buffers(format, master.shape, buffers)


def _empty_buffers(master: Tensor, format: str, name: str) -> list[Tensor]:
    out = QuantizedWeight.empty(get_format(format), master.shape, device=master.device, name=name)
    return list(out.buffers().values())


@in_graphs(fake=_empty_buffers)
def _reference_quantize(master: Tensor, format: str, name: str) -> list[Tensor]:
    buffers = _empty_buffers(master, format, name)
    out = QuantizedWeight.of_buffers(get_format(format), master.shape, buffers)
    quantize_into(master, out.format, out, name=name)
    return buffers


@torch.no_grad()
def quantize_into(
    master: Tensor, format: BlockScaledFormat, out: QuantizedWeight, *, name: str = "weight"
) -> None:
    """Write ``quantize(master, format)`` into the existing buffers of ``out``, in place.

    Overwrites every byte of every buffer and nothing else, so buffers may be views into padded
    storage. Arguments and errors are those of :func:`quantize_gathered_into`.
    """
    quantize_gathered_into(master, format, out, name=name)
    derive_into(out)


@torch.no_grad()
def quantize_gathered_into(
    master: Tensor, format: BlockScaledFormat, out: QuantizedWeight, *, name: str = "weight"
) -> None:
    """Write the gathered buffers of ``quantize(master, format)``, in place.

    Overwrites every byte of ``out.gathered_buffers()`` and nothing else: directly if all buffers
    are contiguous, else through copies.

    Args:
        master: [E, R, C] fp32 or bf16 on the device of ``out``.
        format: format of ``out``.
        out: buffers to overwrite.
        name: name of the weight, for errors.

    Raises:
        LayoutError: inconsistent dtype, shape or format.
    """
    if master.dtype not in (torch.float32, torch.bfloat16):
        raise LayoutError(f"{name}: expected a master in fp32 or bf16, got {master.dtype}.")
    if out.format != format or out.shape != tuple(master.shape):
        raise LayoutError(
            f"{name}: expected storage for {format.name} {list(master.shape)}, got "
            f"{out.format.name} {list(out.shape)}."
        )
    if master.numel() == 0:
        if out.global_amax is not None:
            out.global_amax.zero_()
        return
    buffers = out.buffers()
    if all(map(Tensor.is_contiguous, buffers.values())):
        quantize_blocks_into(master, out)
        return
    contiguous = QuantizedWeight.empty(format, out.shape, device=master.device)
    quantize_blocks_into(master, contiguous)
    for field, written in contiguous.gathered_buffers().items():
        buffers[field].copy_(written)
