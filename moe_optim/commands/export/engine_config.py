"""What ``quantization_config`` in ``config.json`` says of exported weights, by convention."""

from collections.abc import Callable, Sequence
from typing import Any

from moe_optim.rollout.conventions import Convention


def quantization_config(convention: Convention, unquantized: Sequence[str]) -> dict[str, Any]:
    """Return the configuration by which engines know a checkpoint's format.

    Activations are quantized by the engine, on the fly; those of NVFP4 stay in bf16, since their
    global scale takes a calibration.

    Args:
        convention: of the experts.
        unquantized: paths of the modules that stay in bf16, without ``.weight``.
    """
    return _MAKERS[convention.name](convention, list(unquantized))


def _deepseek(convention: Convention, unquantized: list[str]) -> dict[str, Any]:
    return {
        "quant_method": "mxfp8" if convention.format == "mxfp8" else "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(convention.scale_block),
        "modules_to_not_convert": unquantized,
    }


def _modelopt(convention: Convention, unquantized: list[str]) -> dict[str, Any]:
    algorithm = {"mxfp8": "MXFP8", "nvfp4": "W4A16_NVFP4"}[convention.format]
    return {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "group_size": convention.scale_block[1],
        "ignore": unquantized,
    }


_NUMBER = {"type": "float", "symmetric": True, "dynamic": False}
_SCHEMES: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "mxfp8": (
        "mxfp8-quantized",
        {"num_bits": 8, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
        {"num_bits": 8, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
    ),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {
            "num_bits": 4,
            "strategy": "tensor_group",
            "group_size": 16,
            "scale_dtype": "torch.float8_e4m3fn",
        },
        None,
    ),
    "fp8_block": (
        "float-quantized",
        {"num_bits": 8, "strategy": "block", "block_structure": [128, 128]},
        {"num_bits": 8, "strategy": "group", "group_size": 128},
    ),
    "fp8": (
        "float-quantized",
        {"num_bits": 8, "strategy": "channel"},
        {"num_bits": 8, "strategy": "token"},
    ),
}
"""By format: what compressed-tensors calls it, and its arguments of weights and activations."""


def _compressed_tensors(convention: Convention, unquantized: list[str]) -> dict[str, Any]:
    form, weights, activations = _SCHEMES[convention.format]
    group = {
        "targets": ["Linear"],
        "format": form,
        "weights": _NUMBER | weights,
        "input_activations": activations and _NUMBER | activations | {"dynamic": True},
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": unquantized,
    }


_MAKERS: dict[str, Callable[[Convention, list[str]], dict[str, Any]]] = {
    "deepseek": _deepseek,
    "modelopt": _modelopt,
    "compressed_tensors": _compressed_tensors,
}
