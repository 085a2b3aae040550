"""Values that quantized weights were given, kept until masters are made of them.

Until an optimizer exists, a weight keeps its own: a portable one those last written into it, one of
Transformer Engine those it was initialised with. From then on modules keep what they load.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakSet

from megatron.core.utils import log_single_rank
from torch import Tensor
from torch.nn import Module, Parameter

from moe_optim.weights.grouped_weight import GroupedWeight
from moe_optim.weights.managed import is_managed, storage_of
from moe_optim.weights.te.fields import is_quantized
from moe_optim.weights.te.storage import TransformerEngineStorage

logger = logging.getLogger(__name__)
_KEEPING: WeakSet[Module] = WeakSet()


def renew_initial_values(params: Iterable[Parameter]) -> None:
    """Let no master start from initial values that have been overwritten. No rank communicates.

    Transformer Engine keeps what it initialised a weight with, and Megatron makes masters of that,
    also of weights that were loaded before the optimizer was built. Those give what their bytes
    stand for.

    Args:
        params: managed parameters, and any others.
    """
    stale = 0
    for param in params:
        storage = storage_of(param)
        if isinstance(storage, TransformerEngineStorage) and not isinstance(param, GroupedWeight):
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
    """Have modules keep, on the host, what they load into managed weights from now on.

    An optimizer that loads its own masters drops these values; one that makes its masters of the
    weights takes them, which quantizing has cost nothing. A second call adds nothing.

    A load into weights that are behind their masters raises StateError before it changes them: the
    gather, begun or still to come, would overwrite what is loaded.
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
