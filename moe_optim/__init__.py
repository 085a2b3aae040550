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
    "ConfigError",
    "Description",
    "GroupedLinear",
    "GroupedWeight",
    "LayoutError",
    "MoEOptimConfig",
    "MoEOptimError",
    "MoEOptimizerConfig",
    "NonFiniteError",
    "PatchError",
    "Recipe",
    "StateError",
    "__version__",
    "amaxes_from_modelopt",
    "amaxes_to_modelopt",
    "calibrate",
    "calibrated_amax",
    "calibrated_input_amax",
    "convert_state_dict",
    "dequantize",
    "describe",
    "export_weights",
    "fake_quantize",
    "get_format",
    "get_megatron_optimizer",
    "infer_gemm_partition",
    "infer_partition",
    "install",
    "load_recipe",
    "merge_adapters",
    "quantize",
    "quantize_part",
    "set_calibrated_amax",
    "set_calibrated_input_amax",
    "synchronize_amax",
    "uninstall",
    "use_cpu",
]

_LAZY = {
    "Description": "moe_optim.optimizer.description",
    "GroupedLinear": "moe_optim.experts.grouped_linear",
    "GroupedWeight": "moe_optim.weights.grouped_weight",
    "amaxes_from_modelopt": "moe_optim.calibration.modelopt_amaxes",
    "amaxes_to_modelopt": "moe_optim.calibration.modelopt_amaxes",
    "calibrate": "moe_optim.calibration.calibrate",
    "calibrated_amax": "moe_optim.calibration.calibrated_amax",
    "calibrated_input_amax": "moe_optim.calibration.calibrated_amax",
    "convert_state_dict": "moe_optim.experts.keys.conversion",
    "dequantize": "moe_optim.ops",
    "describe": "moe_optim.optimizer.description",
    "export_weights": "moe_optim.rollout.weights",
    "fake_quantize": "moe_optim.calibration.fake_quantization",
    "quantize": "moe_optim.ops",
    "MoEOptimConfig": "moe_optim.config",
    "MoEOptimizerConfig": "moe_optim.integration.bridge",
    "Recipe": "moe_optim.config.recipes",
    "get_format": "moe_optim.formats",
    "get_megatron_optimizer": "moe_optim.optimizer.factory",
    "infer_gemm_partition": "moe_optim.formats.gemm_partition",
    "infer_partition": "moe_optim.formats.partition",
    "install": "moe_optim.integration.installation",
    "load_recipe": "moe_optim.config.recipes",
    "merge_adapters": "moe_optim.experts.adapters",
    "quantize_part": "moe_optim.parts",
    "set_calibrated_amax": "moe_optim.calibration.calibrate",
    "set_calibrated_input_amax": "moe_optim.calibration.calibrate",
    "synchronize_amax": "moe_optim.calibration.state_entries",
    "uninstall": "moe_optim.integration.installation",
    "use_cpu": "moe_optim.integration.cpu_runtime",
}


def __getattr__(name: str) -> Any:
    """Load a public name from its module on first use."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value  # cached for later accesses
    return value


def __dir__() -> list[str]:
    return __all__
