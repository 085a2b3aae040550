"""Quantization and dequantization of weights.

For weights that are requantized, stepped or measured repeatedly, build a plan once
(``moe_optim.kernels``) and launch it at every step. A requantization writes the gathered buffers;
after the gather, ``finish`` derives the others on every rank::

    members.launch -> all-gather -> finish                               shards of whole blocks
    find_maxima -> MAX all-reduce -> encode -> all-gather -> finish      shards that cut blocks
    step.launch -> MAX all-reduce -> encode_shared -> all-gather -> ...  with an optimizer step
    find_amaxes -> MAX all-reduce -> tensorwise.launch -> ...            per-tensor scaling
"""

from collections.abc import Sequence
from functools import partial
from typing import cast, overload

import torch
from torch import Tensor

from moe_optim import library
from moe_optim.errors import LayoutError
from moe_optim.formats import BlockScaledFormat, Direction, QuantizedWeight, get_format
from moe_optim.formats.reference.dequantizing import empty_values
from moe_optim.kernels.dequantize import dequantize as dequantize_buffers
from moe_optim.kernels.member_table import MemberTable
from moe_optim.kernels.plan import Backend
from moe_optim.kernels.table_entry import TableEntry


@overload
def quantize(
    weights: Tensor,
    format: BlockScaledFormat | str,
    *,
    out: QuantizedWeight | None = None,
    backend: Backend = "auto",
) -> QuantizedWeight: ...
@overload
def quantize(
    weights: Sequence[Tensor],
    format: BlockScaledFormat | str,
    *,
    out: Sequence[QuantizedWeight] | None = None,
    backend: Backend = "auto",
) -> list[QuantizedWeight]: ...
def quantize(
    weights: Tensor | Sequence[Tensor],
    format: BlockScaledFormat | str,
    *,
    out: QuantizedWeight | Sequence[QuantizedWeight] | None = None,
    backend: Backend = "auto",
) -> QuantizedWeight | list[QuantizedWeight]:
    """Quantize weights, in all directions of the format; one launch where kernels are supported.

    The bytes match Transformer Engine: values are rounded to bf16 first, maxima ignore NaN, casts
    round to nearest even and saturate.

    Args:
        weights: fp32 or bf16, [E, R, C] or [R, C] (one expert); or a sequence of them, of any
            shapes, on one device. Only non-contiguous weights are copied.
        format: format or its name, see ``moe_optim.formats.FORMATS``.
        out: buffers to overwrite, from an earlier call; new ones if not given.
        backend: ``auto`` for kernels where supported, ``reference`` for plain torch.

    Returns:
        Buffers on the device of the weights: one record, or one per tensor of a sequence.

    Raises:
        ConfigError: unknown format or backend.
        LayoutError: unsupported shape or dtype, or buffers that do not fit.
    """
    if isinstance(format, str):
        format = get_format(format)
    is_one = isinstance(weights, Tensor)
    sources = [weights] if isinstance(weights, Tensor) else list(weights)
    names = ["weights" if is_one else f"weights[{i}]" for i in range(len(sources))]
    shapes = [(1, *w.shape) if w.dim() == 2 else tuple(w.shape) for w in sources]
    if out is None:
        targets = [
            QuantizedWeight.empty(format, shape, device=source.device, name=name)
            for source, shape, name in zip(sources, shapes, names, strict=True)
        ]
    else:
        targets = [out] if isinstance(out, QuantizedWeight) else list(out)
    _check_targets(format, shapes, targets)
    _check_devices(sources)
    if torch.compiler.is_compiling() or any(source.is_meta for source in sources):
        found = _quantize([source.detach() for source in sources], format.name, backend)
        count = len(format.buffer_names)
        parts = [found[first : first + count] for first in range(0, len(found), count)]
        if out is None:
            pairs = zip(shapes, parts, strict=True)
            targets = [QuantizedWeight.of_buffers(format, shape, part) for shape, part in pairs]
        else:
            for target, part in zip(targets, parts, strict=True):
                for buffer, values in zip(target.buffers().values(), part, strict=True):
                    buffer.copy_(values)
        return targets[0] if is_one else targets
    dense = [source.detach().resolve_neg().contiguous() for source in sources]
    entries = [
        TableEntry(parameter=name, source=source.view(shape), target=target)
        for name, source, shape, target in zip(names, dense, shapes, targets, strict=True)
    ]
    table = MemberTable.build(entries, backend=backend)
    table.launch()
    table.finish.launch()
    return targets[0] if is_one else targets


def _empty_buffers(weights: list[Tensor], format: str, backend: str) -> list[Tensor]:  # noqa: ARG001
    shapes = [(1, *w.shape) if w.dim() == 2 else w.shape for w in weights]
    pairs = zip(shapes, weights, strict=True)
    targets = [QuantizedWeight.empty(get_format(format), s, device=w.device) for s, w in pairs]
    return [buffer for target in targets for buffer in target.buffers().values()]


@partial(library.operation, fake=_empty_buffers)
def _quantize(weights: list[Tensor], format: str, backend: str) -> list[Tensor]:
    quantized = quantize(weights, format, backend=cast(Backend, backend))
    return [buffer for one in quantized for buffer in one.buffers().values()]


def dequantize(
    quantized: QuantizedWeight, direction: Direction = "rowwise", *, backend: Backend = "auto"
) -> Tensor:
    """Return the values of one direction, as the forward or the dgrad GEMM reads them.

    One launch where kernels are supported.

    Args:
        quantized: buffers, as :func:`quantize` returns them; not modified.
        direction: ``rowwise`` for the forward GEMM, ``columnwise`` for the dgrad.
        backend: ``auto`` for a kernel where supported, ``reference`` for plain torch.

    Returns:
        [E, R, C] bf16, newly allocated, on the device of the buffers.

    Raises:
        ConfigError: unknown direction or backend.
    """
    data, scale = quantized.data(direction), quantized.scale(direction)
    name = quantized.format.name
    return _dequantize(data, scale, quantized.global_amax, name, direction, backend)


@library.in_graphs(fake=empty_values(torch.bfloat16))
def _dequantize(
    data: Tensor,
    scale: Tensor,
    global_amax: Tensor | None,
    format: str,
    direction: str,
    backend: str,
) -> Tensor:
    given = get_format(format), cast(Direction, direction)
    kind = cast(Backend, backend)
    return dequantize_buffers(data, scale, *given, global_amax=global_amax, backend=kind)


def _check_targets(
    format: BlockScaledFormat, shapes: Sequence[tuple[int, ...]], targets: Sequence[QuantizedWeight]
) -> None:
    wanted = [(format.name, shape) for shape in shapes]
    got = [(target.format.name, target.shape) for target in targets]
    if wanted != got:
        raise LayoutError(
            f"quantize: out: expected buffers of {_spell(wanted)}, got {_spell(got)}. Pass the "
            "result of an earlier call with such weights, or omit out."
        )


def _check_devices(sources: Sequence[Tensor]) -> None:
    devices = sorted({str(source.device) for source in sources})
    if len(devices) > 1:
        raise LayoutError(
            f"quantize: weights: expected tensors on one device, got {', '.join(devices)}. Call it "
            "once for each device."
        )


def _spell(kinds: Sequence[tuple[str, tuple[int, ...]]]) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in kinds) or "nothing"
