"""Expert linears of a model chunk, portable or Transformer Engine's, and their amaxes."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.nn import Module

from moe_optim.errors import ConfigError, LayoutError
from moe_optim.weights.names import BASE, base_of, is_wrapper, unwrapped_name
from moe_optim.weights.recorded_amax import RecordsAmax
from moe_optim.weights.storage import WeightStorage
from moe_optim.weights.te.fields import is_grouped, plain_values


class LinearRecorder(RecordsAmax):
    """Recorded amaxes of a grouped linear of Transformer Engine, outside of its state.

    References the linear weakly.
    """

    def __init__(self, linear: Any) -> None:
        self._linear = ref(linear)

    @property
    def name(self) -> str:  # type: ignore[override]
        """Name of the linear, taken from its weights."""
        storages = self.storages()
        return storages[0].name.rpartition(".")[0] if storages else "experts"

    def storages(self) -> list[WeightStorage]:
        """Return the storage of each weight, in expert order; empty for bf16 experts."""
        linear = self._linear()
        weights = [] if linear is None else _te_weights(linear)
        return [w.quantized_storage for w in weights if hasattr(w, "quantized_storage")]

    def forget_amax(self) -> None:
        """Mark amaxes unknown until the next requantization, since storages do not see loads.

        Formats with a global amax load it with the weights.
        """
        self._whole_amax = None
        for storage in self.storages():
            if storage.recorded_amax is not None:
                storage.recorded_amax.fill_(torch.nan)


_RECORDERS: WeakKeyDictionary[Module, LinearRecorder] = WeakKeyDictionary()


def recorder_of(linear: Module) -> RecordsAmax:
    """Return the recorder of an expert linear; a portable one is its own."""
    if isinstance(linear, RecordsAmax):
        return linear
    if linear not in _RECORDERS:
        _RECORDERS[linear] = LinearRecorder(linear)
    return _RECORDERS[linear]


@dataclass(frozen=True, slots=True)
class ExpertLinear:
    """One linear of all local experts of a layer."""

    name: str  # path in the chunk, without the names of wrappers
    module: Module  # owner of the weights
    num_experts: int  # number of local experts
    groups: Any  # process groups of the layer: ep, expt_tp and expt_dp
    is_adapted: bool  # whether an adapter adds to its outputs

    @property
    def recorder(self) -> RecordsAmax:
        """Recorder of the amaxes of the last requantization."""
        return recorder_of(self.module)

    def weights(self) -> list[Any]:
        """Return the parameters in expert order, one of all experts or one per expert."""
        linear: Any = self.module
        return list(linear.weights()) if is_portable(linear) else _te_weights(linear)

    def values(self) -> Iterator[Tensor]:
        """Yield the values of each expert [R, C], dequantized to bf16 one weight at a time.

        StateError if a weight is stale or offloaded.
        """
        for weight in self.weights():
            values = plain_values(weight)
            yield from [values] if values.dim() == 2 else members_of(values)


def require_chunks(model_chunks: Iterable[Module], where: str) -> list[Module]:
    """Return ``model_chunks`` as a list; raise ConfigError at ``where`` for others."""
    chunks = [] if isinstance(model_chunks, Module) else list(model_chunks)
    if not chunks or not all(isinstance(chunk, Module) for chunk in chunks):
        got = [type(chunk).__name__ for chunk in chunks] or type(model_chunks).__name__
        raise ConfigError(
            f"{where}: model_chunks: expected a list of this rank's model chunks, got "
            f"{got if chunks else f'no chunk ({got})'}. Give what get_model() returned, or [model]."
        )
    return chunks


def is_portable(module: Module) -> bool:
    """Return whether a module is a ``GroupedLinear``, the only module that records amaxes."""
    return isinstance(module, RecordsAmax)


def expert_linears(chunk: Module) -> Iterator[ExpertLinear]:
    """Yield every expert linear of a chunk, portable ones first, without adapters around them.

    LayoutError if a wrapper other than an adapter hides a linear.
    """
    named = list(chunk.named_modules())
    for path, experts in named:
        for name, child in () if is_wrapper(experts) else experts.named_children():
            linear: Any = base_of(child)
            if not is_portable(linear):
                continue
            groups = getattr(experts, "pg_collection", None)
            if groups is None:
                raise unknown_wrapper(path, experts)
            name = unwrapped_name(f"{path}.{name}" if path else name)
            yield ExpertLinear(name, linear, linear.shape[0], groups, linear is not child)
    for name, linear in filter(_is_grouped_linear, named):
        is_adapted, name = name.endswith(f".{BASE}"), unwrapped_name(name) or "experts"
        yield ExpertLinear(name, linear, linear.num_gemms, linear._pg_collection, is_adapted)


def grouped_linears(module: Module) -> Iterator[tuple[str, Any]]:
    """Yield name and module of Transformer Engine's grouped linears in a module.

    Wrappers that forward their attributes are skipped.
    """
    yield from filter(_is_grouped_linear, module.named_modules())


def _is_grouped_linear(named: tuple[str, Any]) -> bool:
    linear = named[1]
    is_grouped = hasattr(type(linear), "_split_grouped_checkpoint_tensor")
    return is_grouped and "num_gemms" in vars(linear)


def _te_weights(linear: Module) -> list[Any]:
    named = linear.named_parameters(recurse=False)
    return [param for name, param in named if name.startswith("weight")]


def members_of(tensor: Any) -> Sequence[Any]:
    """Return the tensor of each expert in one of all experts, a ``GroupedTensor`` or any other."""
    if is_grouped(tensor):
        return tensor.quantized_tensors or tensor.split_into_quantized_tensors()
    return tensor.unbind(0)


def unknown_wrapper(name: str, module: Module) -> LayoutError:
    """Return the error for a wrapper ``module`` at path ``name`` that hides an expert linear."""
    inside = (str(one.name) for one in module.modules() if isinstance(one, RecordsAmax))
    return LayoutError(
        f"{next(inside, name)}: expected a linear of experts, or an adapter around one with "
        f"children to_wrap and adapter, as Megatron-Bridge's are, got {type(module).__name__}, "
        "which hides its weights. Wrap it as Megatron-Bridge does, or not at all; if it is a layer "
        "of your own, give it pg_collection, Megatron's ProcessGroupCollection."
    )
