"""Converts non-expert tensors from Megatron's names and shapes to Hugging Face's."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import Tensor

from moe_optim.errors import ConfigError, listed
from moe_optim.rollout.families import FAMILIES, Anatomy, NamePair, Trait
from moe_optim.rollout.rows import Heads

_LAYERS = [re.compile(rf"{stack}\.layers\.(\d+)\.") for stack in ("decoder", "mtp")]
_TRAITS: Mapping[Trait, str] = {
    "untied": r"output_layer\.weight",
    "query_lora": r".*\.linear_q_down_proj\.weight",
    "no_query_lora": r".*\.linear_q_proj\.weight",
    "expert_bias": r".*\.router\.expert_bias",
    "shared_experts": r".*\.shared_experts\..*",
}
"""Patterns of names that only models with the trait have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseNames:
    """Hugging Face's names of a model's non-expert tensors."""

    pairs: Mapping[str, NamePair]
    """Pairs by Megatron's name."""
    heads: Heads
    vocabulary: int | None = None
    """Unpadded rows of embeddings; None: all."""

    def convert(self, name: str, values: Tensor) -> dict[str, Tensor]:
        """Return a Megatron tensor as Hugging Face's, views where possible."""
        pair = self.pairs[name]
        if pair.hf[0] in ("model.embed_tokens.weight", "lm_head.weight"):
            values = values[: self.vocabulary]
        parts = self.heads.split(pair.form, values)
        return dict(zip(pair.hf, parts * (len(pair.hf) // len(parts)), strict=True))


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
