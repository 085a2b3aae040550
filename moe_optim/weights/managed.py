"""Detection of parameters that buffers of this package manage: those with a quantized storage."""

from typing import Any

from torch import Tensor

from moe_optim.integration.installation import installed_config
from moe_optim.weights.grouped_weight import GroupedWeight
from moe_optim.weights.te.fields import te_formats_of


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
