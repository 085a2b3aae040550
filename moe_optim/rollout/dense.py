"""Reads non-expert tensors through Megatron's sharded state dict, reassembles and names them."""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.utils import unwrap_model
from torch import Tensor
from torch.nn import SiLU
from torch.nn.functional import silu

from moe_optim.checkpoint.files.reader import TensorInfo
from moe_optim.errors import ConfigError, StateError, listed, refuse
from moe_optim.rollout.families import FAMILIES, Anatomy, NamePair, Trait, family_of
from moe_optim.rollout.units import HeldPart
from moe_optim.weights.grouped_weight import GroupedWeight
from moe_optim.weights.te.fields import is_quantized, read_values, require_memory

_LAYERS = [re.compile(rf"{stack}\.layers\.(\d+)\.") for stack in ("decoder", "mtp")]
_TRAITS: Mapping[Trait, str] = {
    "untied": r"output_layer\.weight",
    "query_lora": r".*\.linear_q_down_proj\.weight",
    "no_query_lora": r".*\.linear_q_proj\.weight",
    "expert_bias": r".*\.router\.expert_bias",
    "shared_experts": r".*\.shared_experts\..*",
}
"""Patterns of names that only models with the trait have."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalPart:
    """A part of a tensor on this rank, and its record for other ranks."""

    held: HeldPart
    values: Tensor

    def read(self) -> Tensor:
        """Return the values as a view; quantized weights as bf16."""
        return read_values(self.values) if is_quantized(self.values) else self.values.detach()


def local_parts(chunk: Any) -> Iterator[LocalPart]:
    """Yield the non-expert tensors of a chunk, under checkpoint names.

    StateError for an offloaded tensor, or a quantized one older than its masters.
    """
    state = unwrap_model(chunk).sharded_state_dict()
    kept = {
        key: value
        for key, value in state.items()
        if "experts" not in f"{key}.{getattr(value, 'key', key)}".split(".")
    }
    apply_factories(kept)
    for one in nested_values(kept):
        if isinstance(one, ShardedTensor) and not isinstance(one.data, GroupedWeight):
            yield _part_of(one)


def _part_of(sharded: ShardedTensor) -> LocalPart:
    values, axes, name = sharded.data, sharded.prepend_axis_num, sharded.key
    if axes:  # Megatron prepends the layer number as an axis
        (number,) = sharded.global_offset[:axes]
        head, layers, tail = name.partition("layers.")
        name = f"{head}{layers}{number}.{tail}"
    require_memory(f"export_weights: {name}", values)
    dtype = torch.bfloat16 if is_quantized(values) else values.dtype
    held = HeldPart(
        name=name,
        whole=TensorInfo(tuple(sharded.global_shape[axes:]), dtype),
        start=tuple(sharded.global_offset[axes:]),
        part=TensorInfo(tuple(sharded.local_shape), dtype),
    )
    return LocalPart(held=held, values=values)


class Wholes:
    """Assembles tensors from their parts."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[Tensor, int]] = {}

    def add(self, held: HeldPart, values: Tensor) -> Tensor | None:
        """Add a part; return the whole tensor after its last part, as a view if unsharded."""
        if held.part.shape == held.whole.shape:
            return values
        if held.name not in self._open:
            shape, dtype = held.whole.shape, held.whole.dtype
            self._open[held.name] = torch.empty(shape, dtype=dtype, device=values.device), 0
        whole, arrived = self._open.pop(held.name)
        box = tuple(
            slice(start, start + size)
            for start, size in zip(held.start, held.part.shape, strict=True)
        )
        whole[box] = values
        arrived += values.numel()
        if arrived == whole.numel():
            return whole
        self._open[held.name] = whole, arrived
        return None

    def check_complete(self) -> None:
        """Raise StateError if parts of any tensor are missing."""
        if self._open:
            raise StateError(
                f"export_weights: expected all parts of {', '.join(sorted(self._open))}, got some. "
                "Every rank of the model must call it, with all of its chunks."
            )


def require_plain_model(chunk: Any) -> None:
    """Raise ConfigError for settings with which Hugging Face's code computes something else."""
    config, model = chunk.config, unwrap_model(chunk)
    family = family_of(config.multi_latent_attention)
    unlike = {}
    for name, values in family.settings.items():
        value = getattr(config, name, getattr(model, name, values[0]))
        unlike[f"{name} {value!r}"] = value not in values
    activation = config.activation_func
    unlike[f"activation_func {getattr(activation, '__name__', activation)}"] = (
        activation is not silu and not isinstance(activation, SiLU)
    )
    refuse(
        unlike,
        expected=f"export_weights: expected a model that transformers computes as {family.name}",
        remedy="Pass layout='sequential' or 'grouped', under Megatron's names, and convert the "
        "weights yourself; or train without these settings.",
    )


def find_pairs(names: Collection[str]) -> Mapping[str, NamePair]:
    """Return the name pairs of the family with exactly these tensors, by Megatron's name.

    ``names`` are those of all non-expert tensors of a model. ConfigError names the closest family.
    """
    layers, mtp_layers = (
        {int(match[1]) for name in names if (match := pattern.match(name))} for pattern in _LAYERS
    )
    anatomy = Anatomy(
        num_layers=max(layers, default=-1) + 1,
        moe_layers=frozenset(n for n in layers if f"decoder.layers.{n}.mlp.router.weight" in names),
        traits=frozenset(
            trait for trait, said in _TRAITS.items() if any(re.fullmatch(said, n) for n in names)
        ),
        mtp_layers=len(mtp_layers),
    )
    faults: dict[str, list[str]] = {}
    for family in FAMILIES.values():
        found: dict[str, NamePair] = {}
        missing = []
        for pair in family.pairs(anatomy):
            name = next((name for name in pair.megatron if name in names), None)
            if name is None:
                missing.append(pair.megatron[0])
            else:
                found[name] = pair
        left_over = sorted(name for name in names if name not in found)  # same order on all ranks
        if not missing and not left_over:
            return found
        faults[family.name] = [f"no {n}" for n in missing] + [f"also {n}" for n in left_over]
    closest = min(faults, key=lambda name: len(faults[name]))
    raise ConfigError(
        f"layout hf_per_expert: expected the tensors of one of {', '.join(FAMILIES)}, got "
        f"others; closest is {closest}: {listed(faults[closest], most=4)}. "
        "Export in layout sequential, which keeps Megatron's names."
    )
