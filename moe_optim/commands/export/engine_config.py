"""``quantization_config`` of exported weights, by convention."""

from collections.abc import Sequence
from typing import Any

from moe_optim.rollout.conventions import Convention

Arguments = dict[str, Any]
_GROUP_32: Arguments = {"num_bits": 8, "strategy": "group", "group_size": 32}
_MXFP8 = _GROUP_32 | {"scale_dtype": "torch.uint8"}
_MXFP4 = _MXFP8 | {"num_bits": 4}
_INT4 = _GROUP_32 | {"num_bits": 4, "type": "int"}
_NVFP4: Arguments = {
    "num_bits": 4,
    "strategy": "tensor_group",
    "group_size": 16,
    "scale_dtype": "torch.float8_e4m3fn",
}
_BLOCK = {"num_bits": 8, "strategy": "block", "block_structure": [128, 128]}
_SCHEMES: dict[str, tuple[str, Arguments, Arguments | None]] = {
    "mxfp8": ("mxfp8-quantized", _MXFP8, _MXFP8),
    "mxfp4": ("mxfp4-pack-quantized", _MXFP4, None),
    "int4": ("pack-quantized", _INT4, None),
    "int4_g128": ("pack-quantized", _INT4 | {"group_size": 128}, None),
    "nvfp4": ("nvfp4-pack-quantized", _NVFP4, None),
    "fp8_block": ("float-quantized", _BLOCK, _GROUP_32 | {"group_size": 128}),
    "fp8": (
        "float-quantized",
        {"num_bits": 8, "strategy": "channel"},
        {"num_bits": 8, "strategy": "token"},
    ),
}
"""Format -> its name in compressed-tensors, arguments of weights, arguments of activations."""


def quantization_config(
    convention: Convention, unquantized: Sequence[str], *, has_input_scales: bool = False
) -> dict[str, Any]:
    """Return the ``quantization_config`` by which engines recognize a format.

    Engines quantize activations of eight-bit weights on the fly. Those of four-bit weights stay
    bf16, except for NVFP4 with scales of inputs. ``unquantized`` lists module paths.
    """
    if convention.name == "deepseek":
        return {
            "quant_method": "mxfp8" if convention.format == "mxfp8" else "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(convention.scale_block),
            "modules_to_not_convert": list(unquantized),
        }
    if convention.name == "modelopt":
        nvfp4 = "NVFP4" if has_input_scales else "W4A16_NVFP4"
        return {
            "quant_method": "modelopt",
            "quant_algo": {"mxfp8": "MXFP8", "nvfp4": nvfp4}[convention.format],
            "group_size": convention.scale_block[1],
            "ignore": list(unquantized),
        }
    form, weights, activations = _SCHEMES[convention.format]
    dynamic: bool | str = True
    if has_input_scales:  # block scales are found on the fly, the global one is stored
        activations, dynamic = weights, "local"
    number = {"type": "float", "symmetric": True, "dynamic": False}
    group = {
        "targets": ["Linear"],
        "format": form,
        "weights": number | weights,
        "input_activations": activations and number | activations | {"dynamic": dynamic},
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": list(unquantized),
    }
