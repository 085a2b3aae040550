"""Tensors that are no experts', from Megatron's names and shapes to those of Hugging Face."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from moe_optim.errors import ConfigError
from moe_optim.hugging_face.families import FAMILIES, Anatomy, Family, NamePair, Trait

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
_INNER_MTP = re.compile(r"mtp\.layers\.(\d+)\.transformer_layer\.")
_MTP = tuple(
    NamePair(megatron=(f"{megatron}.weight",), hf=(f"{hf}.weight",))
    for megatron, hf in {
        "enorm": "enorm",
        "hnorm": "hnorm",
        "eh_proj": "eh_proj",
        "final_layernorm": "shared_head.norm",
    }.items()
)
"""Of a layer of multi-token prediction beside the layer inside of it, which is as all others."""
_COPIES: Mapping[str, str] = {
    "model.embed_tokens.weight": "embed_tokens.weight",
    "lm_head.weight": "shared_head.head.weight",
}


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
    depth = 1 + max((int(found[1]) for name in names if (found := _LAYER.match(name))), default=-1)
    called = {_after_decoder(name, depth): name for name in names}
    family, pairs = _find_family(called.keys(), depth)
    return family, {called[name]: pair for name, pair in pairs.items()}


def _after_decoder(name: str, depth: int) -> str:
    """Return a name with the inner layer of multi-token prediction N as layer ``depth`` + N."""
    return _INNER_MTP.sub(lambda found: f"decoder.layers.{depth + int(found[1])}.", name)


def _find_family(names: Collection[str], depth: int) -> tuple[Family, Mapping[str, NamePair]]:
    traits = frozenset(
        trait for trait, said in _TRAITS.items() if any(re.fullmatch(said, n) for n in names)
    )
    layers = {int(found[1]) for name in names if (found := _LAYER.match(name))}
    anatomy = Anatomy(
        num_layers=max(layers, default=-1) + 1,
        moe_layers=frozenset(n for n in layers if f"decoder.layers.{n}.mlp.router.weight" in names),
        traits=traits,
    )
    faults: dict[str, list[str]] = {}
    for family in FAMILIES.values():
        pairs, missing = _match(_pairs_of(family, anatomy, depth), names)
        left_over = [name for name in names if name not in pairs]
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


def _pairs_of(family: Family, anatomy: Anatomy, depth: int) -> Iterator[NamePair]:
    """Yield the pairs of a model whose layers from ``depth`` on predict further tokens.

    They read the embedding and the head of the model, which DeepSeek-V3 has again in each of them.
    """
    predicting = range(depth, anatomy.num_layers) if family.name == "deepseek_v3" else ()
    for pair in family.pairs(anatomy):
        copies = _COPIES.get(pair.hf[0])
        more = tuple(f"model.layers.{n}.{copies}" for n in predicting) if copies else ()
        yield replace(pair, hf=pair.hf + more)
    for number in predicting:
        for pair in _MTP:
            yield pair.behind(f"mtp.layers.{number - depth}.", f"model.layers.{number}.")


def _match(
    wanted: Iterable[NamePair], names: Collection[str]
) -> tuple[dict[str, NamePair], list[str]]:
    """Return pairs by the name that a model has, and what it lacks."""
    found: dict[str, NamePair] = {}
    missing = []
    for pair in wanted:
        name = next((name for name in pair.megatron if name in names), None)
        if name is None:
            missing.append(pair.megatron[0])
        else:
            found[name] = pair
    return found, missing
