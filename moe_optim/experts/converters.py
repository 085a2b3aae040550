"""Refuses conversions, by other packages, of weights that each hold all experts of a layer.

Megatron-Bridge and mbridge read the number of an expert from the name of its weight, ``weight17``.
Experts in one ``weight`` would be left out, or exported whole under a name without a number.
"""

import sys
from collections.abc import Iterable
from functools import wraps
from typing import Any

import torch

from moe_optim.errors import ConfigError
from moe_optim.experts.grouped_linear import GroupedLinear

CONVERSIONS = (
    (
        "megatron.bridge.models.conversion.model_bridge",
        "MegatronModelBridge",
        "_megatron_global_param_names_all_pp_ranks",
    ),
    ("mbridge.core.bridge", "Bridge", "_weight_name_mapping_mcore_local_to_global"),
)
"""Module, class and method with which every conversion of a model begins."""
_MARK = "requires_expert_names"


def guard_converters() -> None:
    """Let converters that are imported refuse such models. Idempotent, and never undone."""
    for module, class_name, method in CONVERSIONS:
        owner = getattr(sys.modules.get(module), class_name, None)
        call = getattr(owner, method, None)
        if call is not None and not hasattr(call, _MARK):
            setattr(owner, method, _guarded(call))


def _guarded(call: Any) -> Any:
    @wraps(call)
    def convert(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        _require_expert_names(model if isinstance(model, list) else [model])
        return call(self, model, *args, **kwargs)

    vars(convert)[_MARK] = True
    return convert


def _require_expert_names(models: Iterable[torch.nn.Module]) -> None:
    for name, module in (pair for model in models for pair in model.named_modules()):
        if isinstance(module, GroupedLinear) and module.expert_layout == "grouped":
            raise ConfigError(
                f"{name}: expected one weight per expert to convert to or from Hugging Face's "
                "names, got one weight of all experts. Set expert_layout to indexed before the "
                "model is built, or export with moe_optim.export_weights."
            )
