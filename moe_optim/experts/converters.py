"""Makes converters of other packages take this package's weights, or refuse them.

Megatron-Bridge and mbridge read the number of an expert from the name of its weight, ``weight17``.
Experts in one ``weight`` would be left out, or exported whole under a name without a number, and
are refused. Megatron-Bridge dequantizes weights of Transformer Engine's classes alone, before it
cuts and joins them; quantized weights of one expert each are dequantized with them.
"""

import sys
from collections.abc import Iterable
from functools import wraps
from typing import Any

import torch

from moe_optim.errors import ConfigError
from moe_optim.experts.grouped_linear import GroupedLinear
from moe_optim.weights.grouped_weight import GroupedWeight

CONVERSIONS = (
    (
        "megatron.bridge.models.conversion.model_bridge",
        "MegatronModelBridge",
        "_megatron_global_param_names_all_pp_ranks",
    ),
    ("mbridge.core.bridge", "Bridge", "_weight_name_mapping_mcore_local_to_global"),
)
"""Module, class and method with which every conversion of a model begins."""
DEQUANTIZATIONS = (
    ("megatron.bridge.models.conversion.param_mapping", "MegatronParamMapping", "maybe_dequantize"),
)
"""Module, class and method that every exported weight passes."""
_MARK = "takes_weights_of_moe_optim"


def guard_converters() -> None:
    """Change converters that are imported as described above. Idempotent, and never undone."""
    for wrap, methods in ((_guarded, CONVERSIONS), (_dequantizing, DEQUANTIZATIONS)):
        for module, class_name, method in methods:
            owner = getattr(sys.modules.get(module), class_name, None)
            call = getattr(owner, method, None)
            if call is not None and not hasattr(call, _MARK):
                changed = wrap(call)
                vars(changed)[_MARK] = True
                setattr(owner, method, changed)


def _dequantizing(call: Any) -> Any:
    @wraps(call)
    def maybe_dequantize(self: Any, tensor: Any) -> Any:
        return tensor.dequantize() if isinstance(tensor, GroupedWeight) else call(self, tensor)

    return maybe_dequantize


def _guarded(call: Any) -> Any:
    @wraps(call)
    def convert(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        _require_expert_names(model if isinstance(model, list) else [model])
        return call(self, model, *args, **kwargs)

    return convert


def _require_expert_names(models: Iterable[torch.nn.Module]) -> None:
    for name, module in (pair for model in models for pair in model.named_modules()):
        if isinstance(module, GroupedLinear) and module.expert_layout == "grouped":
            raise ConfigError(
                f"{name}: expected one weight per expert to convert to or from Hugging Face's "
                "names, got one weight of all experts. Set expert_layout to indexed before the "
                "model is built, or export with moe_optim.export_weights."
            )
