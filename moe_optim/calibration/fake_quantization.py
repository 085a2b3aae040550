"""Fake quantization of experts anywhere in memory, on a grid or to a block-scaled format."""

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakTensorKeyDictionary

from moe_optim.calibration.fake_operations import (
    clipped_gradient,
    count_experts,
    cut_like,
    fake_blocks,
    fake_quantized,
)
from moe_optim.errors import ConfigError, LayoutError, NonFiniteError
from moe_optim.formats import FORMATS, get_format
from moe_optim.kernels.plan import Backend, check_backend

Bits = int | Literal["e4m3"]  # grid: number of bits of an integer, or E4M3

BITS = range(2, 17)  # supported numbers of bits of integer grids


class PerExpertGrid(NamedTuple):
    """A grid with one amax per expert, for GEMMs of bf16 experts."""

    name: str
    bits: int | None  # number of integer bits; None for E4M3


_GRIDS = PerExpertGrid("int8_per_expert", 8), PerExpertGrid("e4m3_per_expert", None)
PER_EXPERT_GRIDS: Mapping[str, PerExpertGrid] = {grid.name: grid for grid in _GRIDS}
"""Values of ``compute`` besides block-scaled formats."""

Axis = Literal[0] | tuple[Literal[0]] | None
"""0 or ``(0,)`` for one amax per expert, None for one of all experts."""

_SEEN: MutableMapping[Tensor, int] = WeakTensorKeyDictionary()
"""Checked amax on a GPU -> its version at the check."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def fake_quantize[Weights: (Tensor, Sequence[Tensor])](
    weights: Weights,
    amax: Tensor | None = None,
    bits: Bits = 8,
    axis: Axis = 0,
    *,
    format: str | None = None,
    narrow_range: bool = False,
    check_values: bool = True,
    backend: Backend = "auto",
) -> Weights:
    """Return the nearest values on a grid with one amax per expert, or those of a format.

    One launch reads all experts in place, and one launch of the backward pass all gradients;
    nothing is stacked. On a grid, results have the dtype of the weights and match NVIDIA ModelOpt's
    ``TensorQuantizer`` in plain torch to the bit, see docs/fake-quantization.md. The gradient
    passes where the magnitude of a weight is at most its amax, and is zero elsewhere; ``amax`` gets
    no gradient.

    With ``format``, results are the bf16 values of weights quantized to it and dequantized. Every
    gradient passes, without a launch. ``nvfp4_rows`` takes one more launch, for the amax per
    expert.

    Args:
        weights: tensor [E, R, C], or a list of [R, C] of any shapes; fp32, bf16 or fp16, all on one
            device. Copied only if not contiguous. A ``format`` takes fp32 and bf16.
        amax: magnitude of the largest grid value: E elements with ``axis=0``, such as [E, 1, 1] or
            [E], one with ``axis=None``; fp32, bf16 or fp16, on the same device. Values up to 2^-24
            count as zero: integers then give zeros, and E4M3 uses 1 instead.
        bits: 2 to 16 for an integer grid, or ``e4m3``.
        axis: 0 or ModelOpt's ``(0,)`` for one amax per expert; None for one of all experts.
        format: row-only format, such as ``mxfp4``, instead of ``amax``, ``bits`` and ``axis``.
        narrow_range: whether an integer grid ends at ``-max`` and not at ``-max - 1``.
        check_values: whether NaN, Inf and negative values in ``amax`` are errors. On a GPU the
            check synchronizes with the device, once per version of the tensor. Without it, and in a
            compiled graph, NaN and Inf make all values of their expert NaN, and negative values
            count as zero.
        backend: ``auto`` for kernels where available, ``reference`` for plain torch.

    Returns:
        A tensor [E, R, C], or a list of tensors. They are views of one allocation, one expert after
        the other, and must not be written in place while autograd records.

    Raises:
        ConfigError: an unsupported ``bits``, ``axis``, ``format`` or ``backend``, or a negative
            amax.
        LayoutError: no experts, or incompatible shapes, dtypes or devices.
        NonFiniteError: an amax is Inf or NaN.
    """
    axis = expert_axis(axis, "fake_quantize")
    _check_bits(bits)
    check_backend(backend)
    experts = [weights] if isinstance(weights, Tensor) else list(weights)
    _check_experts(experts, 3 if isinstance(weights, Tensor) else 2)
    results: tuple[Tensor, ...]
    if format is not None:
        _check_blocks(experts, format, amax, (bits, axis, narrow_range))
        results = _FakeBlocks.apply(format, backend, *experts)
    else:
        amax = _check_amax(amax, experts, axis)
        if check_values and not torch.compiler.is_compiling():
            _check_values(amax)
        flat = amax.detach().flatten().contiguous()
        grid = None if bits == "e4m3" else bits
        results = _FakeQuantize.apply(flat, grid, narrow_range, backend, *experts)
    return results[0] if isinstance(weights, Tensor) else list(results)


class _FakeBlocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, format: str, backend: Backend, *experts: Tensor) -> tuple[Tensor, ...]:
        ctx.dtype = experts[0].dtype
        values = [expert.contiguous() for expert in experts]
        return cut_like(fake_blocks(values, format, backend), experts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(gradient.to(ctx.dtype) for gradient in gradients)


class _FakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        amax: Tensor,
        bits: int | None,
        narrow_range: bool,
        backend: Backend,
        *experts: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(amax, *experts)
        ctx.backend = backend
        values = [expert.contiguous() for expert in experts]
        return cut_like(fake_quantized(values, amax, bits, narrow_range, backend), experts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        amax, *experts = ctx.saved_tensors
        values = [expert.contiguous() for expert in experts]
        given = [gradient.contiguous() for gradient in gradients]
        clipped = cut_like(clipped_gradient(values, amax, given, ctx.backend), experts)
        return None, None, None, None, *clipped


def expert_axis(axis: Axis, where: str, others: str = "") -> Literal[0] | None:
    """Return 0 for one amax per expert, None for one of all; raise ConfigError otherwise.

    ``others`` names further values that the caller accepts.
    """
    given: object = axis[0] if isinstance(axis, tuple | list) and len(axis) == 1 else axis
    if given is None and axis is None:
        return None
    if isinstance(given, int) and not isinstance(given, bool) and given == 0:
        return 0
    raise ConfigError(
        f"{where}: axis: expected 0 or (0,) for one amax per expert, or None for one of all"
        f"{others}, got {axis!r}. Give one of them."
    )


def _check_bits(bits: Bits) -> None:
    if bits != "e4m3" and (type(bits) is not int or bits not in BITS):
        raise ConfigError(
            f"fake_quantize: bits: expected {BITS[0]} to {BITS[-1]} or 'e4m3', got {bits!r}. "
            "Write 8 for integers of a byte."
        )


def _check_experts(experts: Sequence[Tensor], dims: int) -> None:
    expected = "[E, R, C]" if dims == 3 else "a list of [R, C]"
    if not experts or (dims == 3 and experts[0].dim() == 3 and not len(experts[0])):
        raise LayoutError(
            f"fake_quantize: weights: expected {expected} of at least one expert, got none. Leave "
            "out ranks that have no experts."
        )
    first = experts[0]
    kinds = [(type(one), one.dim(), one.dtype, one.device) for one in experts]
    for index in sorted(map(kinds.index, set(kinds))):  # usually one kind, to save host time
        expert = experts[index]
        where = "fake_quantize: weights" + ("" if dims == 3 else f"[{index}]")
        if expert.dim() != dims:
            raise LayoutError(
                f"{where}: expected {expected}, got shape {list(expert.shape)}. Give experts of "
                "one tensor three axes, and those of a list two."
            )
        if expert.dtype not in _DTYPES or expert.dtype != first.dtype:
            raise LayoutError(
                f"{where}: expected fp32, bf16 or fp16, the same for all, got {expert.dtype} "
                f"after {first.dtype}. Call once for each dtype."
            )
        if expert.device != first.device:
            raise LayoutError(
                f"{where}: expected all experts on {first.device}, got {expert.device}. Call once "
                "for each device."
            )
        if type(expert) not in (Tensor, torch.nn.Parameter):  # subclasses may lack plain data
            raise LayoutError(
                f"{where}: expected a plain tensor, got {type(expert).__name__}. Give its values, "
                "dequantize(): quantized weights lie on a grid already."
            )


def _check_blocks(
    experts: Sequence[Tensor], name: str, amax: Tensor | None, grid: tuple[object, ...]
) -> None:
    if amax is not None or grid != (8, 0, False):
        raise ConfigError(
            "fake_quantize: format: expected neither amax nor bits, axis and narrow_range, got one "
            f"beside {name}. Give the format alone: its blocks have their own scales."
        )
    format = get_format(name)
    if not format.is_row_only:
        known = " or ".join(one.name for one in FORMATS.values() if one.is_row_only)
        raise ConfigError(
            f"fake_quantize: format: expected {known}, got '{name}'. Use a format whose values "
            "are the same in the GEMMs of both directions."
        )
    if experts[0].dtype == torch.float16:
        raise LayoutError(
            f"fake_quantize: weights: expected fp32 or bf16 for {name}, got torch.float16. Convert "
            "them to fp32, which is rounded to bf16 first."
        )
    for index, expert in enumerate(experts):
        where = "fake_quantize: weights" + ("" if expert.dim() == 3 else f"[{index}]")
        format.check_shape(expert.shape if expert.dim() == 3 else (1, *expert.shape), where)


def _check_amax(amax: Tensor | None, experts: Sequence[Tensor], axis: int | None) -> Tensor:
    """Return the amax; check shape, dtype and device, without synchronizing with the device."""
    count = 1 if axis is None else sum(map(count_experts, experts))
    if not isinstance(amax, Tensor):
        raise LayoutError(
            f"fake_quantize: amax: expected a tensor of {count}, got {amax!r}. Calibrate first, or "
            "give weights.abs().amax((1, 2), keepdim=True), or a format."
        )
    if amax.numel() != count:
        what = "all experts" if axis is None else f"{count} experts"
        raise LayoutError(
            f"fake_quantize: amax: expected {count} for {what} with axis={axis}, got shape "
            f"{list(amax.shape)}. Give one per expert with axis=0, or one in all with axis=None."
        )
    if amax.dtype not in _DTYPES or amax.device != experts[0].device:
        raise LayoutError(
            f"fake_quantize: amax: expected fp32, bf16 or fp16 on {experts[0].device}, got "
            f"{amax.dtype} on {amax.device}. Convert it."
        )
    return amax


def _check_values(amax: Tensor) -> None:
    """Raise for negative and non-finite values; on a GPU, once per version of a tensor."""
    version = None if _is_read_anew(amax) else amax._version
    if version is not None and _SEEN.get(amax) == version:
        return
    values = amax.detach().flatten().float().cpu()
    wrong = (~values.isfinite()).nonzero().flatten().tolist()
    if wrong:
        raise NonFiniteError(
            f"fake_quantize: amax: expected finite values, got {values[wrong[0]].item()} for "
            f"expert {wrong[0]}, and {len(wrong)} such values of {len(values)}. Look for Inf and "
            "NaN in the weights, then calibrate again."
        )
    if (values < 0).any():
        first = int((values < 0).nonzero()[0])
        raise ConfigError(
            f"fake_quantize: amax: expected magnitudes, got {values[first].item()} for expert "
            f"{first}. Pass the largest absolute values."
        )
    if version is not None:
        _SEEN[amax] = version


def _is_read_anew(amax: Tensor) -> bool:
    """Return whether to check again: on a CPU, or in inference, which does not count writes."""
    return amax.device.type == "cpu" or amax.is_inference()
