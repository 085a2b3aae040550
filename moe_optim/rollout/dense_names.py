"""Tensors that are no experts', from Megatron's names and shapes to those of Hugging Face."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import Tensor

from moe_optim.errors import ConfigError
from moe_optim.rollout.families import FAMILIES, Anatomy, Family, NamePair, Trait

_LISTED = 4
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_TRAITS: Mapping[Trait, str] = {
    "untied": r"output_layer\.weight",
    "query_lora": r".*\.linear_q_down_proj\.weight",
    "no_query_lora": r".*\.linear_q_proj\.weight",
    "expert_bias": r".*\.router\.expert_bias",
    "shared_experts": r".*\.shared_experts\..*",
}
"""What a model has, by a name that it has then."""
_MTP_LAYER = re.compile(r"mtp\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Heads:
    """How rows of query, key and value lie in one tensor."""

    groups: int
    """Of queries that share a key and a value."""
    size: int
    """Rows of one head."""

    def split(self, values: Tensor) -> list[Tensor]:
        """Return query, key and value rows of a tensor that has them group by group."""
        by_group = values.view(self.groups, -1, self.size, *values.shape[1:])
        query, key, value = by_group[:, :-2], by_group[:, -2], by_group[:, -1]
        return [query.flatten(0, 2), key.flatten(0, 1), value.flatten(0, 1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseNames:
    """What Hugging Face calls every tensor of one model but its experts."""

    family: Family
    pairs: Mapping[str, NamePair]
    """By the name that Megatron has."""
    heads: Heads
    vocabulary: int | None = None
    """Rows of embeddings that are words; None: all."""

    def convert(self, name: str, values: Tensor) -> dict[str, Tensor]:
        """Return a tensor of Megatron's as those of Hugging Face, views where they lie so."""
        pair = self.pairs[name]
        if pair.form == "qkv":
            parts = self.heads.split(values)
        elif pair.form == "gate_up":
            parts = list(values.chunk(2))
        else:
            is_vocabulary = pair.hf[0] in ("model.embed_tokens.weight", "lm_head.weight")
            parts = [values[: self.vocabulary] if is_vocabulary else values] * len(pair.hf)
        return dict(zip(pair.hf, parts, strict=True))


def find_family(names: Collection[str]) -> tuple[Family, Mapping[str, NamePair]]:
    """Return the one family whose models have exactly these tensors, and each by Megatron's name.

    Args:
        names: of all tensors of a model but its experts.

    Raises:
        ConfigError: no family has them; the closest is named, with what differs.
    """
    traits = frozenset(
        trait for trait, said in _TRAITS.items() if any(re.fullmatch(said, n) for n in names)
    )
    layers, mtp_layers = (
        {int(found[1]) for name in names if (found := pattern.match(name))}
        for pattern in (_LAYER, _MTP_LAYER)
    )
    anatomy = Anatomy(
        num_layers=max(layers, default=-1) + 1,
        moe_layers=frozenset(n for n in layers if f"decoder.layers.{n}.mlp.router.weight" in names),
        traits=traits,
        mtp_layers=len(mtp_layers),
    )
    faults: dict[str, list[str]] = {}
    for family in FAMILIES.values():
        pairs, missing = _match(family, anatomy, names)
        left_over = sorted(name for name in names if name not in pairs)  # on all ranks alike
        if not missing and not left_over:
            return family, pairs
        faults[family.name] = [f"no {n}" for n in missing] + [f"also {n}" for n in left_over]
    closest = min(faults, key=lambda name: len(faults[name]))
    listed = faults[closest][:_LISTED]
    more = len(faults[closest]) - len(listed)
    raise ConfigError(
        f"layout hf_per_expert: expected the tensors of one of {', '.join(FAMILIES)}, got "
        f"others; closest is {closest}: {', '.join(listed)}{f' and {more} more' if more else ''}. "
        "Export in layout sequential, which keeps Megatron's names."
    )


def _match(
    family: Family, anatomy: Anatomy, names: Collection[str]
) -> tuple[dict[str, NamePair], list[str]]:
    """Return pairs by the name that a model has, and what it lacks."""
    found: dict[str, NamePair] = {}
    missing = []
    for pair in family.pairs(anatomy):
        name = next((name for name in pair.megatron if name in names), None)
        if name is None:
            missing.append(pair.megatron[0])
        else:
            found[name] = pair
    return found, missing
