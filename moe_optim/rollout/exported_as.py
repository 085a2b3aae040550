"""Names of exported experts, and the tensors that they name."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from torch import Tensor

from moe_optim.errors import ConfigError
from moe_optim.experts.keys.layouts import LINEARS, KeyLayout, KeyPattern
from moe_optim.formats import get_format
from moe_optim.rollout.conventions import Convention, find_convention
from moe_optim.rollout.expert_buffers import describe_expert
from moe_optim.rollout.expert_tensors import (
    RowSplit,
    patterns_of,
    stack_experts,
    tensor_template,
)
from moe_optim.rollout.families import expert_prefixes
from moe_optim.rollout.units import HeldExperts
from moe_optim.weights.te.fields import TENSORWISE


@dataclass(frozen=True, slots=True)
class ExportedAs:
    """Naming of exported experts, the same on every rank."""

    layout: KeyLayout
    convention: str | None
    has_input_scales: bool = False
    """Whether the scale of its inputs is exported with each weight."""

    @property
    def is_stacked(self) -> bool:
        """Whether one tensor holds all experts of a layer."""
        return not self.layout.patterns[0].is_per_expert

    @property
    def is_renamed(self) -> bool:
        """Whether names are Hugging Face's, with all gate rows before all up rows."""
        return self.layout.name not in ("sequential", "grouped")

    def names(self, held: HeldExperts, experts: Iterable[int]) -> tuple[str, ...]:
        """Return the names of the tensors of some experts, in export order."""
        prefix, convention = self._prefix(held), self._convention_of(held)
        suffixes = (held.kind,) if convention is None else convention.suffixes
        if self.has_input_scales and convention is not None and convention.input_scale:
            suffixes += (convention.input_scale,)
        templates = [
            prefix + tensor_template(pattern, suffix)
            for pattern in self._patterns(held)
            for suffix in suffixes
        ]
        if self.is_stacked:
            return tuple(templates)
        return tuple(one.format(expert=expert) for expert in experts for one in templates)

    def tensors(self, held: HeldExperts, buffers: Sequence[Tensor]) -> list[Tensor]:
        """Return stacked tensors [E, ...] of whole experts' buffers; views where possible."""
        count = len(self._patterns(held))
        is_gate_up = held.linear.endswith(LINEARS[0])
        split = RowSplit(
            parts=count,
            interleave=held.interleave,
            is_fused=is_gate_up and count == 1 and self.is_renamed,
        )
        convention = self._convention_of(held)
        amax = held.input_amax if self.has_input_scales else None
        parts = stack_experts(buffers, held.format, convention, split, held.linear, amax)
        return [tensor for part in parts for tensor in part.values()]

    def listed(self, stacked: Sequence[Tensor]) -> Iterator[Tensor]:
        """Return the tensors that :meth:`names` names, given stacked ones."""
        if self.is_stacked:
            return iter(stacked)
        return chain.from_iterable(zip(*(one.unbind(0) for one in stacked), strict=True))

    def check(self, held: HeldExperts) -> None:
        """Raise ConfigError or LayoutError if experts have no such tensors or names."""
        if self.has_input_scales and held.kind == "weight":
            require_input_scale("export_weights: input_scales", self._convention_of(held))
            require_input_amax(f"export_weights: {held.linear}", held.input_amax)
        self.tensors(held, describe_expert(held))
        self._prefix(held)

    def _convention_of(self, held: HeldExperts) -> Convention | None:
        if held.format == "bf16":
            return None
        format = None if held.format == TENSORWISE else get_format(held.format)
        return find_convention(format, self.convention)

    def _patterns(self, held: HeldExperts) -> tuple[KeyPattern, ...]:
        return patterns_of(self.layout, held.linear.rpartition(".")[2], held.kind)

    def _prefix(self, held: HeldExperts) -> str:
        container = held.linear.rpartition(".")[0]
        if not self.is_renamed:
            return f"{container}."
        if held.hf_layer is not None:
            return expert_prefixes(held.hf_layer)[1]
        raise ConfigError(
            f"export_weights: layout {self.layout.name}: expected experts of decoder.layers.N.mlp "
            f"or of an MTP layer, got {container}, for which Hugging "
            "Face's models have no name here. Export in layout sequential, which keeps Megatron's "
            "names."
        )


def require_input_scale(where: str, convention: Convention | None) -> None:
    """Raise ConfigError, starting with ``where``, if engines scale no inputs of a convention."""
    if convention is None or convention.input_scale is None:
        got = "bf16" if convention is None else f"{convention.format} in {convention.name}"
        raise ConfigError(
            f"{where}: expected experts in nvfp4, whose inputs engines scale by a calibrated amax, "
            f"got {got}. Export without input scales."
        )


def require_input_amax(where: str, amax: float | None) -> None:
    """Raise ConfigError, starting with ``where``, unless an amax of inputs is above zero."""
    if amax is None or not 0 < amax < math.inf:
        raise ConfigError(
            f"{where}: expected a calibrated amax of inputs above zero, got {amax}. Call "
            "moe_optim.calibrate(..., forward_loop=...), or export without input scales."
        )
