"""LoRA adapters around linears: merged into the weights that they adapt."""

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Identity, Module

from moe_optim.buckets.bucket_group import gather_weights
from moe_optim.calibration.calibrated_amax import calibrated_amax, hold_calibrated_amax
from moe_optim.calibration.linears import ExpertLinear, expert_linears, require_chunks
from moe_optim.errors import ConfigError, LayoutError, StateError, listed
from moe_optim.integration.agreement import agree
from moe_optim.weights.managed import storage_of
from moe_optim.weights.names import ADAPTER, base_of, is_wrapper, unwrapped_name
from moe_optim.weights.te.fields import is_quantized, plain_values, require_memory

_LORA = ("ParallelLinearAdapter", "GroupedExpertLinearAdapter", "SharedOuterGroupedExpertAdapter")
"""Megatron-Bridge's LoRA adapters: of one pair of matrices, of one pair for each expert, and of
one matrix for all experts and one for each."""
_MATRICES = ["linear_in.weight", "linear_out.weight"]
_MOST_NAMES = 20  # maximum number of names in a warning


@torch.inference_mode(False)
@torch.no_grad()
def merge_adapters(model_chunks: Iterable[Module]) -> list[str]:
    """Add every LoRA adapter to the weight that it adapts, and take the adapter out of the model.

    Megatron-Bridge's adapters of portable experts, of Transformer Engine's grouped linears, and of
    dense linears with a plain weight are merged: ``weight + alpha / dim * linear_out @ linear_in``,
    in fp32, rounded once to the dtype of the weight. Quantized weights are dequantized rowwise
    first; the bf16 result is quantized in their format. The model then has the modules, state and
    keys that it had before it was adapted, so that it can be saved, exported and calibrated.

    Experts cut by tensor parallelism get their parts of the same sums. A warning names adapters of
    ``linear_fc2`` among them, whose forward pass in Megatron-Bridge 0.6.2 multiplies each rank's
    parts and does not add them up: the merged model computes something else than the adapted one.

    Amaxes that a linear of experts was calibrated to are forgotten, since they are those of other
    weights. Recorded amaxes become those of the merged values.

    Every rank must call it with all of its chunks. If one rank raises, all do, and nothing is
    merged. DDP and optimizer keep the parameters of the adapters, which the model no longer reads:
    do not step them again.

    Args:
        model_chunks: chunks of this rank's pipeline stage, wrapped by DDP or not.

    Returns:
        Names of the linears of this rank that had adapters.

    Raises:
        ConfigError: no list of chunks, or an adapter other than LoRA.
        LayoutError: matrices do not fit the weight, a weight has several adapters or is tied to
            embeddings, or a wrapper other than an adapter hides experts.
        StateError: an adapter is disabled; or weights are trained beside it, stale, offloaded, or
            of another format than the installed one.
    """
    chunks: list[Module] = agree(lambda: require_chunks(model_chunks, "merge_adapters"), None)
    found: list[_Adapted] = agree(lambda: [a for chunk in chunks for a in _adapted_in(chunk)], None)
    for chunk in chunks:
        gather_weights(chunk)
    agree(lambda: _require_mergeable(found), None)
    if unlike := [one.name for one in found if one.omits_a_sum()]:
        warnings.warn(
            f"merge_adapters: {listed(unlike, most=_MOST_NAMES)}: with "
            "--expert-tensor-parallel-size above 1, Megatron-Bridge's adapters of linear_fc2 do "
            "not compute linear_out @ linear_in, which was added. Evaluate the merged model.",
            stacklevel=2,
        )
    for one in found:
        one.merge()
    return [one.name for one in found]


def _adapted_in(chunk: Module) -> Iterator["_Adapted"]:
    experts = {linear.module: linear for linear in expert_linears(chunk)}
    for path, parent in chunk.named_modules():
        for child, wrapper in () if is_wrapper(parent) else parent.named_children():
            if is_wrapper(wrapper):
                name = unwrapped_name(f"{path}.{child}" if path else child)
                linear = experts.get(base_of(wrapper))
                yield _Adapted(
                    name=name, parent=parent, child=child, wrapper=wrapper, experts=linear
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Adapted:
    name: str  # path in the chunk, without the names of wrappers
    parent: Module
    child: str  # name of the wrapper in parent
    wrapper: Any
    experts: ExpertLinear | None  # None for a dense linear

    @property
    def _adapter(self) -> Any:
        return self.wrapper.get_submodule(ADAPTER)

    @property
    def _weights(self) -> list[Any]:
        """Weights in expert order, of one expert or of all; the only one of a dense linear."""
        if self.experts is not None:
            return self.experts.weights()
        weight = base_of(self.wrapper)._parameters.get("weight")
        return [] if weight is None else [weight]

    def require_mergeable(self) -> None:
        where = f"merge_adapters: {self.name}"
        _require_lora(where, self._adapter)
        if not getattr(self.wrapper, "_adapter_enabled", True):
            raise StateError(
                f"{where}: expected an adapter that adds to the outputs, got a disabled one. Call "
                "enable_adapter_layers() first, or remove the adapter."
            )
        if not self._weights:
            raise LayoutError(
                f"{where}: expected a linear with a weight, got "
                f"{type(base_of(self.wrapper)).__name__}. Merge its adapter with Megatron-Bridge."
            )
        for weight in self._weights:
            _require_writable(where, weight)
        self._require_fitting(where)

    def _require_fitting(self, where: str) -> None:
        first, second, dim = *self._matrices, self._adapter.dim
        rows, cols = self._weights[0].shape[-2:]
        size = _size_of(self._group)
        fits = first.shape[-1] == cols and second.shape[-1] == dim
        fits &= first.shape[-2] in (dim, dim / size) and second.shape[-2] in (rows, rows / size)
        count = None if self.experts is None else self.experts.num_experts
        if not fits or any(one.dim() == 3 and len(one) != count for one in (first, second)):
            raise LayoutError(
                f"{where}: expected linear_in [{dim}, {cols}] and linear_out [{rows}, {dim}], of "
                f"all experts or of each of {count or 1}, got {list(first.shape)} and "
                f"{list(second.shape)}. Adapt the linear of this model."
            )

    @property
    def _group(self) -> Any:
        """Group of the ranks that hold parts of the matrices, if there are several."""
        if self.experts is not None:
            return self.experts.groups.expt_tp
        return getattr(self._adapter, "tp_group", None)

    def omits_a_sum(self) -> bool:
        """Return whether the forward pass omits a sum over ranks that cut columns of experts."""
        is_expert = self.experts is not None or getattr(self._adapter, "is_expert", False)
        return is_expert and self._matrices[1].shape[-2] < self._weights[0].shape[-2]

    @property
    def _matrices(self) -> tuple[Tensor, Tensor]:
        """Rank's parts of A [dim, C] and B [R, dim], or one of each expert with an axis before."""
        return self._adapter.linear_in.weight, self._adapter.linear_out.weight

    def merge(self) -> None:
        adapter, (first, second) = self._adapter, self._matrices
        scale = adapter.alpha / adapter.dim
        first = _whole(first, adapter.dim, self._group)
        second = _whole(second, self._weights[0].shape[-2], self._group)
        expert = 0
        for weight in self._weights:
            values = plain_values(weight)
            merged = torch.empty_like(values)
            members = [(values, merged)] if values.dim() == 2 else zip(values, merged, strict=True)
            for before, after in members:
                a, b = (one[expert] if one.dim() == 3 else one for one in (first, second))
                after.copy_(before.float() + scale * (b.float() @ a.float()))
                expert += 1
            _write(weight, merged)
        if self.experts is not None and calibrated_amax(self.experts.module) is not None:
            hold_calibrated_amax(self.experts.module, None)
        setattr(self.parent, self.child, base_of(self.wrapper))


def _require_mergeable(found: Iterable[_Adapted]) -> None:
    owners: dict[Any, _Adapted] = {}
    for one in found:
        one.require_mergeable()
        for weight in one._weights:
            if (other := owners.setdefault(weight, one)) is not one:
                raise LayoutError(
                    f"merge_adapters: {one.name}: expected a weight with one adapter, got that of "
                    f"{other.name}, too. Give every chunk once, and adapt shared linears once."
                )


def _require_lora(where: str, adapter: Module) -> None:
    kinds = {kind.__name__ for kind in type(adapter).__mro__}
    parameters = sorted(name for name, _ in adapter.named_parameters())
    activation = getattr(adapter, "activation", Identity())
    if not isinstance(activation, Identity):
        parameters.append(type(activation).__name__)
    if not kinds & set(_LORA) or parameters != _MATRICES:
        raise ConfigError(
            f"{where}: expected one of Megatron-Bridge's LoRA adapters, {', '.join(_LORA)}, with "
            f"{' and '.join(_MATRICES)} alone, got {type(adapter).__name__} with "
            f"{', '.join(parameters) or 'no parameters'}. Merge it with the library that made it."
        )


def _require_writable(where: str, weight: Any) -> None:
    storage = storage_of(weight)
    if getattr(weight, "main_grad", None) is not None:
        raise StateError(
            f"{where}: expected a frozen weight, got one that DDP and an optimizer train beside "
            "its adapter. Save, load into a model without them, and merge there."
        )
    if storage is not None:
        storage.require_fresh()
        return
    if getattr(weight, "shared_embedding", False):
        raise LayoutError(
            f"{where}: expected a weight of its own, got one tied to embeddings, which would not "
            "change with it. Merge its adapter with Megatron-Bridge, or leave it out of the "
            "targets."
        )
    if is_quantized(weight):
        raise StateError(
            f"{where}: expected a bf16 weight, or one in the installed format, got "
            f"{type(weight).__name__}. Call moe_optim.install() before the model is built."
        )
    require_memory(where, weight)


def _size_of(group: Any) -> int:
    return 1 if group is None else int(group.size())


def _whole(matrix: Tensor, rows: int, group: Any) -> Tensor:
    """Return a matrix of ``rows``, gathered from tensor-parallel ranks if they have parts."""
    if matrix.shape[-2] == rows:
        return matrix
    parts = [torch.empty_like(matrix) for _ in range(_size_of(group))]
    dist.all_gather(parts, matrix.contiguous(), group=group)
    return torch.cat(parts, dim=-2)


def _write(weight: Any, merged: Tensor) -> None:
    storage = storage_of(weight)
    if storage is None:
        weight.copy_(merged)
        return
    if storage.initial is not None:  # masters may be created from it
        storage.initial = merged.to(storage.initial.device)
    if storage.has_moved():
        storage.take_over()
    storage.write(merged.view(storage.shape))
