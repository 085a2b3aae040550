"""Every linear of experts in a model chunk, portable or Transformer Engine's, as one kind."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import Module

from moe_optim.experts.grouped_linear import GroupedLinear
from moe_optim.experts.te_linears import grouped_linears, members_of, recorder_of, weights_of
from moe_optim.experts.wrapped import unknown_wrapper
from moe_optim.weights.grouped_weight import GroupedWeight
from moe_optim.weights.names import BASE, base_of, is_wrapper, unwrapped_name
from moe_optim.weights.recorded_amax import RecordsAmax
from moe_optim.weights.te.fields import is_quantized, read_values


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertLinear:
    """One linear of all local experts of a layer."""

    name: str
    """Its path in the chunk, without the names of wrappers."""
    module: Module
    """What holds the weights."""
    recorder: RecordsAmax
    """What knows the amaxes of the last requantization."""
    num_experts: int
    """Local ones."""
    groups: Any
    """Process groups of the layer: ``ep``, ``expt_tp`` and ``expt_dp``."""
    is_adapted: bool
    """Whether an adapter adds something to its outputs."""

    def weights(self) -> list[Any]:
        """Return the parameters in expert order, one of all experts or one an expert."""
        if isinstance(self.module, GroupedLinear):
            return list(self.module.weights())
        return weights_of(self.module)

    def values(self) -> Iterator[Tensor]:
        """Return the values of each expert [R, C], of quantized ones in bf16, one weight at a time.

        Raises:
            StateError: a weight is behind its masters, or its bytes are on the host.
        """
        for weight in self.weights():
            values = weight
            if isinstance(weight, GroupedWeight):
                values = weight.dequantize()
            elif is_quantized(weight):
                values = read_values(weight)
            yield from [values] if values.dim() == 2 else members_of(values)


def expert_linears(chunk: Module) -> Iterator[ExpertLinear]:
    """Yield every linear of experts of a chunk, portable ones first, in the order of modules.

    Those behind adapters are yielded themselves.

    Raises:
        LayoutError: something that hides it stands in the place of one.
    """
    for path, experts in chunk.named_modules():
        for name, child in () if is_wrapper(experts) else experts.named_children():
            linear = base_of(child)
            if not isinstance(linear, GroupedLinear):
                continue
            groups = getattr(experts, "pg_collection", None)
            if groups is None:
                raise unknown_wrapper(path, experts)
            yield ExpertLinear(
                name=unwrapped_name(f"{path}.{name}" if path else name),
                module=linear,
                recorder=linear,
                num_experts=linear.shape[0],
                groups=groups,
                is_adapted=linear is not child,
            )
    for name, linear in grouped_linears(chunk):
        yield ExpertLinear(
            name=unwrapped_name(name) or "experts",
            module=linear,
            recorder=recorder_of(linear),
            num_experts=linear.num_gemms,
            groups=linear._pg_collection,
            is_adapted=name.endswith(f".{BASE}"),
        )
