"""What a checkpoint says of its tensors, for strict loads, whatever torch describes them with."""

from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.strategies.torch import _get_filesystem_reader

from moe_optim.integration.engine import original

_TARGET = (
    "megatron.core.dist_checkpointing.strategies.torch:"
    "TorchDistLoadShardedStrategy.load_tensors_metadata"
)


def load_tensors_metadata(self: Any, checkpoint_dir: Path, metadata: Any = None) -> Any:
    """Return the tensors of a checkpoint without data; arguments and result are Megatron's.

    Megatron makes an empty tensor with every property that torch keeps of one. Since strides are
    among them (torch 2.15), which no constructor takes, all strict loads fail.
    """
    if metadata is None:
        metadata = _get_filesystem_reader(checkpoint_dir).read_metadata()
    for entry in metadata.state_dict_metadata.values():
        if hasattr(entry, "properties"):  # a tensor
            vars(entry.properties).pop("strides", None)
    return original(_TARGET)(self, checkpoint_dir, metadata)
