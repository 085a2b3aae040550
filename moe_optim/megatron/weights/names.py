"""Names of parameters, whatever wraps the model."""

from collections.abc import Iterable

import torch

_WRAPPERS = {"module", "_orig_mod"}
"""Components that DDP, Float16Module and torch.compile put into the names of what they wrap."""


def unwrapped_name(name: str) -> str:
    """Return a name without the components that wrappers put into it, wherever they stand."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def parameter_names(model_chunks: Iterable[torch.nn.Module]) -> dict[torch.nn.Parameter, str]:
    """Return the unwrapped name of every parameter; those of several chunks may be alike."""
    return {
        param: unwrapped_name(name)
        for chunk in model_chunks
        for name, param in chunk.named_parameters()
    }
