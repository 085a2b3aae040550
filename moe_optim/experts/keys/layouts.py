"""Under which keys and in which order of axes state dicts keep the experts of a layer.

A layout is a value: one :class:`KeyPattern` a kind of key. E is experts, F the width of an expert,
H the model's hidden size; fc1 holds the gate and up projections, fc2 the down projection.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from moe_optim.errors import ConfigError

Projection = Literal["gate", "up", "down"]
"""One of the matrices of an expert: gate and up [F, H], down [H, F]."""

_CANONICAL_AXES = {  # of a weight; a bias leaves the last one out, a tensor of one expert the first
    "gate": ("E", "2F", "F", "H"),
    "up": ("E", "2F", "F", "H"),
    "down": ("E", "H", "F"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyPattern:
    """One kind of key: what follows the container's prefix, and what its tensor holds."""

    template: str
    """With ``{expert}`` where each expert has a key of its own."""
    projections: tuple[Projection, ...]
    """In the order of their rows, or of their blocks of rows where they are interleaved."""
    axes: tuple[str, ...]
    """Of the elements in memory: ``E``, ``H``, ``F``, or ``2F`` for gate and up together."""
    stored: tuple[str, ...]
    """Shape of the tensor: ``axes``, or some of them as one, such as ``E*F``."""

    @property
    def is_per_expert(self) -> bool:
        """Whether each expert has a key of its own."""
        return "{expert}" in self.template

    @property
    def is_bias(self) -> bool:
        """Whether the tensor holds biases: vectors an expert, where weights are matrices."""
        return len(self.axes) - ("E" in self.axes) == 1

    @property
    def canonical_order(self) -> tuple[int, ...]:
        """How to permute the axes to experts (if there are several), rows, columns (if any)."""
        canonical = _CANONICAL_AXES[self.projections[0]]
        return tuple(sorted(range(len(self.axes)), key=lambda i: canonical.index(self.axes[i])))

    def key(self, expert: int | None = None) -> str:
        """Return what follows the prefix: for ``expert`` where each has a key, else for all."""
        return self.template.format(expert=expert)


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyLayout:
    """How the experts of one layer are named and stored."""

    name: str
    """What commands and errors call it."""
    patterns: tuple[KeyPattern, ...]
    """All kinds of keys there can be."""

    @property
    def holds_biases(self) -> bool:
        """Whether there are keys for biases."""
        return any(pattern.is_bias for pattern in self.patterns)

    @property
    def can_interleave(self) -> bool:
        """Whether gate and up share a tensor, so that their rows may alternate."""
        return any(len(pattern.projections) == 2 for pattern in self.patterns)

    @property
    def shows_num_experts(self) -> bool:
        """Whether keys or shapes tell how many experts there are."""
        return all(pattern.is_per_expert or "E" in pattern.stored for pattern in self.patterns)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertSet:
    """The experts of one layer in a state dict: their keys, and with these every shape."""

    prefix: str
    """Of all keys, up to and including the component ``experts.``; empty at the root."""
    layout: KeyLayout
    """How they are named and stored."""
    num_experts: int
    """E."""
    hidden: int
    """H."""
    ffn: int
    """F, of one expert: fc1 has twice as many rows."""
    has_bias: bool = False
    """Whether each of their linears has a bias."""
    extra_states: tuple[str, ...] = ()
    """Keys of Megatron's ``_extra_state`` entries beside them, which no conversion keeps."""

    @property
    def patterns(self) -> tuple[KeyPattern, ...]:
        """The kinds of keys there are."""
        return tuple(p for p in self.layout.patterns if self.has_bias or not p.is_bias)

    @property
    def keys(self) -> tuple[str, ...]:
        """All keys of weights and biases."""
        return tuple(self.shapes())

    def entries(self) -> Iterator[tuple[KeyPattern, int | None, str]]:
        """Return each key with its pattern, and its expert where it is of one."""
        for pattern in self.patterns:
            for expert in range(self.num_experts) if pattern.is_per_expert else (None,):
                yield pattern, expert, self.prefix + pattern.key(expert)

    def sizes(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        """Return the sizes that ``axes`` have here, such as ``2F`` or ``E*F``."""
        sizes = {"E": self.num_experts, "F": self.ffn, "2F": 2 * self.ffn, "H": self.hidden}
        return tuple(math.prod(sizes[axis] for axis in part.split("*")) for part in axes)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every key."""
        return {key: self.sizes(pattern.stored) for pattern, _, key in self.entries()}


def _holds(
    projections: Sequence[Projection], template: str, axes: str, stored: str | None = None
) -> KeyPattern:
    """Return a pattern from the spelling of the table below."""
    return KeyPattern(
        template=template,
        projections=tuple(projections),
        axes=tuple(axes.split()),
        stored=tuple((stored or axes).split()),
    )


_GATE: tuple[Projection] = ("gate",)
_UP: tuple[Projection] = ("up",)
_DOWN: tuple[Projection] = ("down",)
_GATE_UP: tuple[Projection, Projection] = ("gate", "up")

_TABLE = {
    # one parameter a linear: TEGroupedLinear with --moe-single-grouped-weight, and ours
    "grouped": (
        _holds(_GATE_UP, "linear_fc1.weight", "E 2F H"),
        _holds(_GATE_UP, "linear_fc1.bias", "E 2F"),
        _holds(_DOWN, "linear_fc2.weight", "E H F"),
        _holds(_DOWN, "linear_fc2.bias", "E H"),
    ),
    # one parameter an expert: TEGroupedLinear, and ours
    "indexed": (
        _holds(_GATE_UP, "linear_fc1.weight{expert}", "2F H"),
        _holds(_GATE_UP, "linear_fc1.bias{expert}", "2F"),
        _holds(_DOWN, "linear_fc2.weight{expert}", "H F"),
        _holds(_DOWN, "linear_fc2.bias{expert}", "H"),
    ),
    # Megatron's SequentialMLP
    "sequential": (
        _holds(_GATE_UP, "local_experts.{expert}.linear_fc1.weight", "2F H"),
        _holds(_GATE_UP, "local_experts.{expert}.linear_fc1.bias", "2F"),
        _holds(_DOWN, "local_experts.{expert}.linear_fc2.weight", "H F"),
        _holds(_DOWN, "local_experts.{expert}.linear_fc2.bias", "H"),
    ),
    # Megatron's GroupedMLP, last in megatron-core 0.16, transformer/moe/experts.py: the forward
    # pass multiplies by weight1.view(E, H, 2F) and weight2.view(E, F, H), so the bytes are those
    # of experts one after the other although the shapes look as if experts lay side by side
    "legacy": (
        _holds(_GATE_UP, "weight1", "E H 2F", stored="H E*2F"),
        _holds(_DOWN, "weight2", "E F H", stored="E*F H"),
    ),
    # fused experts of Hugging Face models
    "hf": (
        _holds(_GATE_UP, "gate_up_proj", "E 2F H"),
        _holds(_GATE_UP, "gate_up_proj_bias", "E 2F"),
        _holds(_DOWN, "down_proj", "E H F"),
        _holds(_DOWN, "down_proj_bias", "E H"),
    ),
    # the same keys with inputs before outputs: gpt-oss (which interleaves by 1), Llama 4
    "hf_transposed": (
        _holds(_GATE_UP, "gate_up_proj", "E H 2F"),
        _holds(_GATE_UP, "gate_up_proj_bias", "E 2F"),
        _holds(_DOWN, "down_proj", "E F H"),
        _holds(_DOWN, "down_proj_bias", "E H"),
    ),
    # one module an expert: Qwen, DeepSeek
    "hf_per_expert": (
        _holds(_GATE, "{expert}.gate_proj.weight", "F H"),
        _holds(_GATE, "{expert}.gate_proj.bias", "F"),
        _holds(_UP, "{expert}.up_proj.weight", "F H"),
        _holds(_UP, "{expert}.up_proj.bias", "F"),
        _holds(_DOWN, "{expert}.down_proj.weight", "H F"),
        _holds(_DOWN, "{expert}.down_proj.bias", "H"),
    ),
}

LAYOUTS: dict[str, KeyLayout] = {
    name: KeyLayout(name=name, patterns=patterns) for name, patterns in _TABLE.items()
}
"""All named layouts; adding one means adding a value."""

LINEARS = ("linear_fc1", "linear_fc2")
"""Of experts, as Megatron and its plug-ins call them."""
CALIBRATED_AMAX = "calibrated_amax"
"""Under which a linear of experts keeps what calibration has found, [E, 1, 1] or [1, 1, 1]."""

_EXTRA_STATES = tuple(  # what the linears of grouped, indexed and sequential experts save besides
    template.format(linear=linear, expert="{expert}")
    for linear in LINEARS
    for template in (
        "{linear}._extra_state",
        "{linear}._extra_state{expert}",
        "local_experts.{expert}.{linear}._extra_state",
    )
)


def get_layout(name: str) -> KeyLayout:
    """Return the layout called ``name``.

    Raises:
        ConfigError: there is none; the message lists those there are.
    """
    if name not in LAYOUTS:
        raise ConfigError(f"expert key layout: expected one of {', '.join(LAYOUTS)}, got {name!r}.")
    return LAYOUTS[name]


@cache
def _regex(template: str) -> re.Pattern[str]:
    """Match a remainder to the letter; an index is written without leading zeros or signs."""
    index = "(?P<expert>0|[1-9][0-9]{0,8})"
    return re.compile(re.escape(template).replace(re.escape("{expert}"), index))


def match_key(remainder: str, template: str) -> tuple[int | None] | None:
    """Return the expert whose key this is (None for a key of all), or None if it does not match.

    ``remainder`` follows the container's prefix, ``template`` is of a :class:`KeyPattern`.
    """
    found = _regex(template).fullmatch(remainder)
    if found is None:
        return None
    index = found.groupdict().get("expert")
    return (None if index is None else int(index),)


def is_extra_state(remainder: str) -> bool:
    """Return whether ``remainder``, behind the prefix, is neither weight nor bias to Megatron."""
    return any(_regex(template).fullmatch(remainder) for template in _EXTRA_STATES)


def is_calibrated_amax(remainder: str) -> bool:
    """Return whether a linear of experts keeps under ``remainder`` what calibration has found.

    Of any expert layout, and no conversion changes it.
    """
    linear, _, name = remainder.rpartition(".")
    return linear in LINEARS and name == CALIBRATED_AMAX


def is_of_adapter(remainder: str) -> bool:
    """Return whether an adapter around a linear of experts keeps ``remainder``, such as LoRA's.

    Of any expert layout, and no conversion changes it.
    """
    parts = remainder.split(".")
    if parts[0] == "local_experts":
        parts = parts[2:]
    return len(parts) > 2 and parts[0] in LINEARS and parts[1] == "adapter"
