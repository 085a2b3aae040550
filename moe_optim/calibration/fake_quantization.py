"""Fake quantization of experts anywhere in memory: one launch forward, one backward."""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import wraps
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakTensorKeyDictionary

from moe_optim.errors import ConfigError, LayoutError, NonFiniteError
from moe_optim.formats.reference import fake as reference
from moe_optim.kernels.fake import find_table
from moe_optim.kernels.plan import Backend, check_backend, takes_kernels

Bits = int | Literal["e4m3"]
"""Grid: number of bits of an integer, or E4M3."""

BITS = range(2, 17)
"""Supported numbers of bits of integer grids."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PerExpertGrid:
    """A grid with one amax per expert, for GEMMs of bf16 experts."""

    name: str
    bits: int | None
    """Number of integer bits; None for E4M3."""


PER_EXPERT_GRIDS: Mapping[str, PerExpertGrid] = MappingProxyType(
    {
        "int8_per_expert": PerExpertGrid(name="int8_per_expert", bits=8),
        "e4m3_per_expert": PerExpertGrid(name="e4m3_per_expert", bits=None),
    }
)
"""Values of ``compute`` besides block-scaled formats."""

Axis = Literal[0] | tuple[Literal[0]] | None
"""0 or ``(0,)`` for one amax per expert, None for one of all experts."""

_SEEN: MutableMapping[Tensor, int] = WeakTensorKeyDictionary()
"""Checked amax on a GPU -> its version at the check."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def fake_quantize[Weights: (Tensor, Sequence[Tensor])](
    weights: Weights,
    amax: Tensor,
    bits: Bits = 8,
    axis: Axis = 0,
    *,
    narrow_range: bool = False,
    check_values: bool = True,
    backend: Backend = "auto",
) -> Weights:
    """Return the nearest values on a grid with one amax per expert, in the dtype of the weights.

    One launch reads all experts in place, and one launch of the backward pass all gradients;
    nothing is stacked. Results match NVIDIA ModelOpt's ``TensorQuantizer`` in plain torch to the
    bit, see docs/fake-quantization.md. The gradient passes where the magnitude of a weight is at
    most its amax, and is zero elsewhere; ``amax`` gets no gradient.

    Args:
        weights: tensor [E, R, C], or a list of [R, C] of any shapes; fp32, bf16 or fp16, all on one
            device. Copied only if not contiguous.
        amax: magnitude of the largest grid value: E elements with ``axis=0``, such as [E, 1, 1] or
            [E], one with ``axis=None``; fp32, bf16 or fp16, on the same device. Values up to 2^-24
            count as zero: integers then give zeros, and E4M3 uses 1 instead.
        bits: 2 to 16 for an integer grid, or ``e4m3``.
        axis: 0 or ModelOpt's ``(0,)`` for one amax per expert; None for one of all experts.
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
        ConfigError: an unsupported ``bits``, ``axis`` or ``backend``, or a negative amax.
        LayoutError: no experts, or incompatible shapes, dtypes or devices.
        NonFiniteError: an amax is Inf or NaN.
    """
    _check_bits(bits)
    axis = expert_axis(axis, "fake_quantize")
    check_backend(backend)
    experts = [weights] if isinstance(weights, Tensor) else list(weights)
    _check_experts(experts, 3 if isinstance(weights, Tensor) else 2)
    _check_amax(amax, experts, axis)
    if check_values and not torch.compiler.is_compiling():
        _check_values(amax)
    results: tuple[Tensor, ...] = _FakeQuantize.apply(
        amax.detach().flatten().contiguous(),
        None if bits == "e4m3" else bits,
        narrow_range,
        backend,
        *experts,
    )
    return results[0] if isinstance(weights, Tensor) else list(results)


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
        return _cut(fake_quantized(values, amax, bits, narrow_range, backend), experts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        amax, *experts = ctx.saved_tensors
        values = [expert.contiguous() for expert in experts]
        given = [gradient.contiguous() for gradient in gradients]
        clipped = _cut(clipped_gradient(values, amax, given, ctx.backend), experts)
        return None, None, None, None, *clipped


def _cut(flat: Tensor, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    shapes = [one.shape for one in like]
    if all(shape == shapes[0] for shape in shapes):  # one call, since views cost host time
        return flat.view(len(like), *shapes[0]).unbind(0)
    parts = flat.split([one.numel() for one in like])
    return tuple(part.view(shape) for part, shape in zip(parts, shapes, strict=True))


def _empty(values: Sequence[Tensor], *_: Any) -> Tensor:
    return values[0].new_empty(sum(one.numel() for one in values))


def _operation[**P](name: str) -> Callable[[Callable[P, Tensor]], Callable[P, Tensor]]:
    """Make a function an operator in compiled graphs only, since eager calls cost less without one.

    Its fake results are those of :func:`_empty`.
    """

    def decorate(body: Callable[P, Tensor]) -> Callable[P, Tensor]:
        compiled = torch.library.custom_op(f"moe_optim::{name}", body, mutates_args=())
        compiled.register_fake(_empty)

        @wraps(body)
        def call(*args: P.args, **kwargs: P.kwargs) -> Tensor:
            if torch.compiler.is_compiling():
                result: Tensor = compiled(*args, **kwargs)
                return result
            return body(*args, **kwargs)

        return call

    return decorate


@_operation("fake_quantize")
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
    for part, one, own in zip(_cut(result, values), values, _amax_of(values, amax), strict=True):
        part.copy_(reference.fake_quantize(one, own, bits, narrow_range=narrow_range))
    return result


@_operation("clip_gradient")
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
    parts = zip(_cut(result, values), values, _amax_of(values, amax), gradients, strict=True)
    for part, one, own, gradient in parts:
        part.copy_(reference.clip_gradient(one, own, gradient))
    return result


def _amax_of(values: Sequence[Tensor], amax: Tensor) -> list[Tensor]:
    """Return the amaxes of each tensor, in a shape that broadcasts."""
    if amax.numel() == 1:
        return [amax.view(())] * len(values)
    counts = [_count_experts(one) for one in values]
    shapes = [(-1, 1, 1) if one.dim() == 3 else () for one in values]
    return [part.view(shape) for part, shape in zip(amax.split(counts), shapes, strict=True)]


def _count_experts(values: Tensor) -> int:
    return values.shape[0] if values.dim() == 3 else 1


def expert_axis(axis: Axis, where: str) -> Literal[0] | None:
    """Return 0 for one amax per expert, None for one of all; raise ConfigError otherwise."""
    given: object = axis[0] if isinstance(axis, tuple | list) and len(axis) == 1 else axis
    if given is None and axis is None:
        return None
    if isinstance(given, int) and not isinstance(given, bool) and given == 0:
        return 0
    raise ConfigError(
        f"{where}: axis: expected 0 or (0,) for one amax per expert, or None for one of all, got "
        f"{axis!r}. Give one of them."
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


def _check_amax(amax: Tensor, experts: Sequence[Tensor], axis: int | None) -> None:
    """Check shape, dtype and device, without synchronizing with the device."""
    count = 1 if axis is None else sum(map(_count_experts, experts))
    if not isinstance(amax, Tensor):
        raise LayoutError(
            f"fake_quantize: amax: expected a tensor of {count}, got {amax!r}. Calibrate first, or "
            "give weights.abs().amax((1, 2), keepdim=True)."
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
            f"{first}. Take the largest of the absolute values."
        )
    if version is not None:
        _SEEN[amax] = version


def _is_read_anew(amax: Tensor) -> bool:
    """Return whether to check again: on a CPU, or in inference, which does not count writes."""
    return amax.device.type == "cpu" or amax.is_inference()
