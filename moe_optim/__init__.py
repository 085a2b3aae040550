"""A distributed optimizer for Megatron MoE training that keeps expert weights quantized.

Importing the package is cheap and requires neither Megatron, Triton nor a GPU; public names are
loaded on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from moe_optim.errors import (
    ConfigError,
    LayoutError,
    MoEOptimError,
    NonFiniteError,
    PatchError,
    StateError,
)
from moe_optim.version import VERSION

if TYPE_CHECKING:
    from moe_optim.calibration.calibrate import (
        calibrate,
        set_calibrated_amax,
        set_calibrated_input_amax,
    )
    from moe_optim.calibration.calibrated_amax import calibrated_amax, calibrated_input_amax
    from moe_optim.calibration.fake_quantization import fake_quantize
    from moe_optim.calibration.modelopt_amaxes import amaxes_from_modelopt, amaxes_to_modelopt
    from moe_optim.calibration.state_entries import synchronize_amax
    from moe_optim.config import MoEOptimConfig
    from moe_optim.config.recipes import Recipe, load_recipe
    from moe_optim.experts.adapters import merge_adapters
    from moe_optim.experts.grouped_linear import GroupedLinear
    from moe_optim.experts.keys.conversion import convert_state_dict
    from moe_optim.formats import get_format
    from moe_optim.formats.gemm_partition import infer_gemm_partition
    from moe_optim.formats.partition import infer_partition
    from moe_optim.integration.bridge import MoEOptimizerConfig
    from moe_optim.integration.cpu_runtime import use_cpu
    from moe_optim.integration.installation import install, uninstall
    from moe_optim.ops import dequantize, quantize
    from moe_optim.optimizer.description import Description, describe
    from moe_optim.optimizer.factory import get_megatron_optimizer
    from moe_optim.parts import quantize_part
    from moe_optim.rollout.weights import export_weights
    from moe_optim.weights.grouped_weight import GroupedWeight

__version__ = VERSION

__all__ = [
    "ConfigError", "Description", "GroupedLinear", "GroupedWeight", "LayoutError", "MoEOptimConfig",
    "MoEOptimError", "MoEOptimizerConfig", "NonFiniteError", "PatchError", "Recipe", "StateError",
    "__version__", "amaxes_from_modelopt", "amaxes_to_modelopt", "calibrate", "calibrated_amax",
    "calibrated_input_amax", "convert_state_dict", "dequantize", "describe", "export_weights",
    "fake_quantize", "get_format", "get_megatron_optimizer", "infer_gemm_partition",
    "infer_partition", "install", "load_recipe", "merge_adapters", "quantize", "quantize_part",
    "set_calibrated_amax", "set_calibrated_input_amax", "synchronize_amax", "uninstall", "use_cpu",
]  # fmt: skip

_NAMES = {
    "calibration.calibrate": "calibrate set_calibrated_amax set_calibrated_input_amax",
    "calibration.calibrated_amax": "calibrated_amax calibrated_input_amax",
    "calibration.fake_quantization": "fake_quantize",
    "calibration.modelopt_amaxes": "amaxes_from_modelopt amaxes_to_modelopt",
    "calibration.state_entries": "synchronize_amax",
    "config": "MoEOptimConfig",
    "config.recipes": "Recipe load_recipe",
    "experts.adapters": "merge_adapters",
    "experts.grouped_linear": "GroupedLinear",
    "experts.keys.conversion": "convert_state_dict",
    "formats": "get_format",
    "formats.gemm_partition": "infer_gemm_partition",
    "formats.partition": "infer_partition",
    "integration.bridge": "MoEOptimizerConfig",
    "integration.cpu_runtime": "use_cpu",
    "integration.installation": "install uninstall",
    "ops": "dequantize quantize",
    "optimizer.description": "Description describe",
    "optimizer.factory": "get_megatron_optimizer",
    "parts": "quantize_part",
    "rollout.weights": "export_weights",
    "weights.grouped_weight": "GroupedWeight",
}
_LAZY = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Load a public name from its module on first use."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value  # cached for later accesses
    return value


def __dir__() -> list[str]:
    return __all__
