"""The activation between the two linears of an expert, step by step."""

from collections.abc import Callable

from torch import Tensor


def glu(
    hidden: Tensor,
    activation: Callable[[Tensor], Tensor],
    *,
    linear_offset: float = 0.0,
    clamp_value: float | None = None,
) -> Tensor:
    """Apply a gated linear unit: ``activation(gate) * (linear + linear_offset)``.

    Args:
        hidden: [T, 2F], the gate before the linear half.
        activation: of the gate: SiLU for SwiGLU, quick GELU for quick-GeGLU.
        linear_offset: added to the linear half.
        clamp_value: bounds the gate from above and the linear half from both sides.

    Returns:
        [T, F] of the dtype of ``hidden``.
    """
    gate, linear = hidden.chunk(2, dim=-1)
    if clamp_value is not None:
        gate = gate.clamp(max=clamp_value)
        linear = linear.clamp(min=-clamp_value, max=clamp_value)
    return activation(gate) * (linear + linear_offset)
