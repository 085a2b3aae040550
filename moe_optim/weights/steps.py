"""Counts the optimizer steps of a model, since torch counts no writes through DDP's buffers."""

from collections.abc import Iterable
from weakref import WeakKeyDictionary

from megatron.core.utils import unwrap_model
from torch.nn import Module

_steps: WeakKeyDictionary[Module, int] = WeakKeyDictionary()


def count_step(model_chunks: Iterable[Module]) -> None:
    """Count a step that is about to change the weights of chunks."""
    for chunk in model_chunks:
        model = unwrap_model(chunk)
        _steps[model] = _steps.get(model, 0) + 1


def steps_of(chunk: Module) -> int:
    """Return the steps so far of a chunk, wrapped or not."""
    return _steps.get(unwrap_model(chunk), 0)
