"""Parameters that buffers of this package manage, and the values that their masters start from.

Managed are parameters with a quantized storage. Before the optimizer is built, a portable one keeps
the values last written to it, and one of Transformer Engine its initial values. Afterwards, modules
keep the values they load until masters are created from them.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakSet

from megatron.core.utils import log_single_rank
from torch import Tensor
from torch.nn import Module, Parameter

from moe_optim.integration.installation import installed_config
from moe_optim.weights.grouped_weight import GroupedWeight
from moe_optim.weights.te.fields import is_quantized, te_formats_of

logger = logging.getLogger(__name__)
_KEEPING: WeakSet[Module] = WeakSet()


def storage_of(param: Any) -> Any:
    """Return the storage of a parameter, or None for a plain one.

    The first call on a weight of Transformer Engine creates its storage and sets it as
    ``quantized_storage``, if the plug-in is installed with its format or with ``auto``.
    """
    storage = getattr(param, "quantized_storage", None)
    formats = te_formats_of(param) if storage is None else ()
    if formats and (config := installed_config()) is not None:
        from moe_optim.weights.te.storage import TransformerEngineStorage

        chosen = config.resolved(formats[0].name).format
        for format in formats:
            if format.name == chosen:
                storage = TransformerEngineStorage(
                    param, format, record_amax=config.record_amax, backend=config.backend
                )
                param.quantized_storage = storage
    return storage


def is_managed(tensor: Tensor) -> bool:
    """Return whether buckets of this package hold ``tensor``."""
    return isinstance(tensor, GroupedWeight) or storage_of(tensor) is not None


def renew_initial_values(params: Iterable[Parameter]) -> None:
    """Replace initial values that a load made obsolete by dequantized ones.

    Megatron creates masters from Transformer Engine's initial values even if the weight was loaded
    since. No rank communicates.
    """
    stale = 0
    for param in params:
        storage = storage_of(param)
        if storage is not None and not isinstance(param, GroupedWeight):
            stale += storage.renew_initial()
    if stale:
        log_single_rank(
            logger,
            logging.WARNING,
            f"moe_optim: quantized weights were loaded before the optimizer was built ({stale} of "
            "rank 0); their masters start from the quantized values. For masters of the values "
            "themselves load after it, or call optimizer.reload_model_params(state_dict=...).",
        )


def keep_loaded_values(model_chunks: Sequence[Module]) -> None:
    """Make modules keep, on the host, every value they load into managed weights from now on.

    An optimizer that creates masters from the weights uses these values instead of dequantized
    ones; one that loads its masters drops them. Calling it again has no effect.

    Loading into stale weights raises StateError before it changes them, since the next gather would
    overwrite them.
    """
    for chunk in model_chunks:
        for module in chunk.modules():
            if module not in _KEEPING and any(is_managed(p) for p in module.parameters(False)):
                module.register_load_state_dict_pre_hook(_keep)
                _KEEPING.add(module)


def _keep(module: Module, state_dict: Mapping[str, Any], prefix: str, *_: Any) -> None:
    for name, param in module.named_parameters(recurse=False):
        storage, value = getattr(param, "quantized_storage", None), state_dict.get(prefix + name)
        if storage is None or storage.bucket is None:  # a weight in no bucket has no masters
            continue
        if value is not None:
            storage.require_writable()
        if not isinstance(value, Tensor) or isinstance(value, GroupedWeight):
            continue
        if value.shape == param.shape and not is_quantized(value):
            storage.initial = value.detach().to("cpu", copy=True)
