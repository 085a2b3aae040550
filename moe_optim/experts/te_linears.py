"""Grouped linears of Transformer Engine in a model: their experts in one tensor, their amaxes."""

from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch

from moe_optim.weights.recorded_amax import RecordsAmax
from moe_optim.weights.storage import WeightStorage
from moe_optim.weights.te.fields import is_grouped


def grouped_linears(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield every grouped linear below a module with its name, told as Megatron tells them.

    What stands around one and passes its attributes on is none.
    """
    for name, linear in module.named_modules():
        is_grouped = hasattr(type(linear), "_split_grouped_checkpoint_tensor")
        if is_grouped and "num_gemms" in vars(linear):
            yield name, linear


def weights_of(linear: torch.nn.Module) -> list[Any]:
    """Return the weights of a grouped linear in expert order: one of all experts, or one each."""
    named = linear.named_parameters(recurse=False)
    return [param for name, param in named if name.startswith("weight")]


def members_of(tensor: Any) -> Sequence[Any]:
    """Return the tensor of each expert in one of all experts, a ``GroupedTensor`` or any other."""
    if is_grouped(tensor):
        return tensor.quantized_tensors or tensor.split_into_quantized_tensors()
    return tensor.unbind(0)


class LinearRecorder(RecordsAmax):
    """The amaxes of a grouped linear, which are in no state dict of its own."""

    def __init__(self, linear: Any) -> None:
        self._linear = ref(linear)

    @property
    def name(self) -> str:  # type: ignore[override]
        """Of the linear, as its weights are called."""
        storages = self.storages()
        return storages[0].name.rpartition(".")[0] if storages else "experts"

    def storages(self) -> list[WeightStorage]:
        """Return the storage behind each weight, in expert order; none where experts are bf16."""
        linear = self._linear()
        weights = [] if linear is None else weights_of(linear)
        return [w.quantized_storage for w in weights if hasattr(w, "quantized_storage")]

    def forget_amax(self) -> None:
        """Know no amax until the next requantization, as no storage is told of loaded weights.

        Formats with a global amax have it among what is loaded.
        """
        self._whole_amax = None
        for storage in self.storages():
            if storage.recorded_amax is not None:
                storage.recorded_amax.fill_(torch.nan)


_RECORDERS: WeakKeyDictionary[torch.nn.Module, LinearRecorder] = WeakKeyDictionary()


def recorder_of(linear: torch.nn.Module) -> LinearRecorder:
    """Return what knows the amaxes of a grouped linear, the same one every time."""
    if linear not in _RECORDERS:
        _RECORDERS[linear] = LinearRecorder(linear)
    return _RECORDERS[linear]
