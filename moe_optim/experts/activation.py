"""The activation between the two linears of an expert, step by step."""

from collections.abc import Callable

from torch import Tensor


def glu(
    hidden: Tensor,
    activation: Callable[[Tensor], Tensor],
    *,
    linear_offset: float = 0.0,
    clamp_value: float | None = None,
    interleave_size: int | None = None,
) -> Tensor:
    """Apply a gated linear unit: ``activation(gate) * (linear + linear_offset)``.

    Args:
        hidden: [T, 2F], the gate before the linear half, or in blocks of both in turn.
        activation: of the gate: SiLU for SwiGLU, quick GELU for quick-GeGLU.
        linear_offset: added to the linear half.
        clamp_value: bounds the gate from above and the linear half from both sides.
        interleave_size: columns of such a block, which divides F; None where nothing alternates.

    Returns:
        [T, F] of the dtype of ``hidden``.
    """
    if interleave_size is not None:
        hidden = remove_interleaving(hidden, interleave_size)
    gate, linear = hidden.chunk(2, dim=-1)
    if clamp_value is not None:
        gate = gate.clamp(max=clamp_value)
        linear = linear.clamp(min=-clamp_value, max=clamp_value)
    return activation(gate) * (linear + linear_offset)


def remove_interleaving(hidden: Tensor, size: int) -> Tensor:
    """Return [T, 2F] in halves where ``size`` columns of gate and of linear half alternate."""
    blocks = hidden.unflatten(-1, (-1, 2, size))  # [T, F / size, gate or linear, size]
    return blocks.transpose(-3, -2).flatten(-3)
