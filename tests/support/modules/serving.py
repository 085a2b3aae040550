"""What inference engines make of exported weights, in plain torch: an oracle of its own.

Each function restates what an engine does with what it has loaded. None of them calls the product.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from moe_optim.formats import QuantizedWeight

E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def experts_of(quantized: QuantizedWeight) -> list[dict[str, Tensor]]:
    """Return what each expert [R, C] is exported as, in the first convention of its format."""
    return [_expert_of(quantized, expert) for expert in range(quantized.shape[0])]


def _expert_of(quantized: QuantizedWeight, expert: int) -> dict[str, Tensor]:
    data, scale = quantized.rowwise_data[expert], quantized.rowwise_scale[expert]
    match quantized.format.name:
        case "mxfp8" | "mxfp8_rows":
            return {"weight": data.view(torch.float8_e4m3fn), "weight_scale": scale}
        case "mxfp8_2d":
            lines = torch.stack([scale[row // 32] for row in range(quantized.shape[1])])
            return {"weight": data.view(torch.float8_e4m3fn), "weight_scale": lines}
        case "nvfp4":
            lines = torch.stack([scale[row // 16] for row in range(quantized.shape[1])])
            amax = quantized.global_amax[expert]
            return {
                "weight": data,
                "weight_scale": lines.view(torch.float8_e4m3fn),
                "weight_scale_2": (amax.double() / 2688).float(),
            }
        case "nvfp4_rows":
            return {
                "weight": data,
                "weight_scale": scale.view(torch.float8_e4m3fn),
                "weight_scale_2": (quantized.global_amax[expert].double() / 2688).float(),
            }
        case "mxfp4":
            return {"weight_packed": data, "weight_scale": scale}
        case "int4" | "int4_g128":
            return {
                "weight_packed": data.view(torch.int32),
                "weight_scale": scale,
                "weight_shape": torch.tensor(quantized.shape[1:]),
            }
        case "fp8_block" | "fp8_block_fp32":
            return {"weight": data.view(torch.float8_e4m3fn), "weight_scale_inv": scale}
    raise AssertionError(quantized.format.name)


def dequantize(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the bf16 values of one exported weight [R, C], whatever convention it is in."""
    if "weight_scale_inv" in tensors:
        scale = tensors["weight_scale_inv"]
        return (
            mxfp8(tensors["weight"], scale)
            if scale.dtype == torch.uint8
            else blocks(tensors["weight"], scale)
        )
    if "weight_shape" in tensors:
        return int4(*(tensors[f"weight_{name}"] for name in ("packed", "scale", "shape")))
    if "weight_packed" in tensors and "weight_global_scale" not in tensors:
        return mxfp4(tensors["weight_packed"], tensors["weight_scale"])
    if "weight_packed" in tensors:
        names = ("weight_packed", "weight_scale", "weight_global_scale")
        return nvfp4_divided(*(tensors[name] for name in names))
    if "weight_scale_2" in tensors:
        return nvfp4(*(tensors[name] for name in ("weight", "weight_scale", "weight_scale_2")))
    scale = tensors["weight_scale"]
    read = mxfp8 if scale.dtype == torch.uint8 else blocks
    return read(tensors["weight"], scale)


def mxfp8(elements: Tensor, exponents: Tensor) -> Tensor:
    """Multiply runs of 32 columns by two to the power of their byte less 127."""
    powers = torch.exp2(exponents.double() - 127)
    values = elements.double().unflatten(-1, (-1, 32)) * powers.unsqueeze(-1)
    return values.flatten(-2).bfloat16()


def mxfp4(packed: Tensor, exponents: Tensor) -> Tensor:
    """Multiply runs of 32 columns by two to the power of their byte less 127."""
    return mxfp8(unpack(packed), exponents)


def int4(packed: Tensor, scales: Tensor, shape: Tensor) -> Tensor:
    """Multiply integers, eight per word and 8 above their value, by the scale of their run."""
    assert scales.dtype == torch.bfloat16
    shifts = torch.arange(0, 32, 4, dtype=torch.int64)
    codes = (packed.long().unsqueeze(-1) >> shifts & 15).flatten(-2) - 8
    assert list(codes.shape) == shape.tolist()
    runs = codes.double().unflatten(-1, (scales.shape[-1], -1)) * scales.double().unsqueeze(-1)
    return runs.flatten(-2).bfloat16()


def blocks(elements: Tensor, scales: Tensor) -> Tensor:
    """Multiply each element by the scale of its square of 128 by 128."""
    assert scales.dtype == torch.float32
    rows, cols = elements.shape
    spread = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :cols]
    return (elements.float() * spread).bfloat16()


def nvfp4(packed: Tensor, scales: Tensor, scale_2: Tensor) -> Tensor:
    """Multiply elements by the scales of their 16 columns, which is exact, and then by the other.

    As products of four bits do, which scale what they have added up.
    """
    assert scale_2.shape == ()
    return (_scaled(unpack(packed), scales) * scale_2).bfloat16()


def nvfp4_divided(packed: Tensor, scales: Tensor, global_scale: Tensor) -> Tensor:
    """Multiply elements by the quotient of both scales, as compressed-tensors decompresses."""
    assert global_scale.shape == (1,)
    return _scaled(unpack(packed), scales.float() / global_scale).bfloat16()


def _scaled(elements: Tensor, scales: Tensor) -> Tensor:
    return (elements.unflatten(-1, (-1, 16)) * scales.float().unsqueeze(-1)).flatten(-2)


def unpack(packed: Tensor) -> Tensor:
    """Return the elements of bytes, the low four bits first, fp32."""
    return torch.stack([E2M1[(packed & 15).long()], E2M1[(packed >> 4).long()]], -1).flatten(-2)
