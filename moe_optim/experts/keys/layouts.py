"""Key names and axis orders of the experts of a layer in state dicts.

A layout has one :class:`KeyPattern` per kind of key. E is the number of experts, F the width of an
expert, H the hidden size; fc1 holds the gate and up projections, fc2 the down projection.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

from moe_optim.errors import ConfigError

Projection = Literal["gate", "up", "down"]
"""Projection of an expert: gate and up [F, H], down [H, F]."""

_CANONICAL_AXES = {  # weights; biases lack the last axis, tensors of one expert the first
    "gate": ("E", "2F", "F", "H"),
    "up": ("E", "2F", "F", "H"),
    "down": ("E", "H", "F"),
}


@dataclass(frozen=True, slots=True)
class KeyPattern:
    """One kind of key, and the contents of its tensor."""

    template: str
    """Key after the container's prefix, with ``{expert}`` if each expert has its own."""
    projections: tuple[Projection, ...]
    """Projections in the order of their rows, or of row blocks if interleaved."""
    axes: tuple[str, ...]
    """Axes in memory: ``E``, ``H``, ``F``, or ``2F`` for gate and up together."""
    stored: tuple[str, ...]
    """Shape of the tensor: ``axes``, or some of them merged, such as ``E*F``."""

    @property
    def is_per_expert(self) -> bool:
        """Whether each expert has its own key."""
        return "{expert}" in self.template

    @property
    def is_bias(self) -> bool:
        """Whether the tensor holds biases, one vector per expert."""
        return len(self.axes) - ("E" in self.axes) == 1

    @property
    def canonical_order(self) -> tuple[int, ...]:
        """Permutation of the axes to experts, rows, columns; absent axes are omitted."""
        canonical = _CANONICAL_AXES[self.projections[0]]
        return tuple(sorted(range(len(self.axes)), key=lambda i: canonical.index(self.axes[i])))

    def key(self, expert: int | None = None) -> str:
        """Return the key after the prefix, for ``expert`` if each has its own."""
        return self.template.format(expert=expert)


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyLayout:
    """Names and shapes of the experts of one layer."""

    name: str
    """Name in commands and errors."""
    patterns: tuple[KeyPattern, ...]
    """All kinds of keys."""

    @property
    def holds_biases(self) -> bool:
        """Whether it has keys for biases."""
        return any(pattern.is_bias for pattern in self.patterns)

    @property
    def can_interleave(self) -> bool:
        """Whether gate and up share a tensor, so that their rows can alternate."""
        return any(len(pattern.projections) == 2 for pattern in self.patterns)

    @property
    def shows_num_experts(self) -> bool:
        """Whether keys or shapes determine the number of experts."""
        return all(pattern.is_per_expert or "E" in pattern.stored for pattern in self.patterns)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertSet:
    """The experts of one layer in a state dict; determines their keys and shapes."""

    prefix: str
    """Prefix of all keys, through the component ``experts.``; empty at the root."""
    layout: KeyLayout
    """Names and shapes."""
    num_experts: int
    """Number of experts, E."""
    hidden: int
    """Hidden size, H."""
    ffn: int
    """Width F of one expert; fc1 has twice as many rows."""
    has_bias: bool = False
    """Whether both linears have biases."""
    extra_states: tuple[str, ...] = ()
    """Keys of Megatron's ``_extra_state`` entries, which conversions drop."""

    @property
    def patterns(self) -> tuple[KeyPattern, ...]:
        """Kinds of keys in the set."""
        return tuple(p for p in self.layout.patterns if self.has_bias or not p.is_bias)

    @property
    def keys(self) -> tuple[str, ...]:
        """All keys of weights and biases."""
        return tuple(self.shapes())

    def entries(self) -> Iterator[tuple[KeyPattern, int | None, str]]:
        """Yield pattern, expert (None for a key of all experts) and key of each entry."""
        for pattern in self.patterns:
            for expert in range(self.num_experts) if pattern.is_per_expert else (None,):
                yield pattern, expert, self.prefix + pattern.key(expert)

    def sizes(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        """Return the sizes of ``axes`` such as ``2F`` or ``E*F``."""
        sizes = {"E": self.num_experts, "F": self.ffn, "2F": 2 * self.ffn, "H": self.hidden}
        return tuple(math.prod(sizes[axis] for axis in part.split("*")) for part in axes)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every key."""
        return {key: self.sizes(pattern.stored) for pattern, _, key in self.entries()}


_GATE_UP: tuple[Projection, ...] = ("gate", "up")
_GATE: tuple[Projection, ...] = ("gate",)
_UP: tuple[Projection, ...] = ("up",)
_DOWN: tuple[Projection, ...] = ("down",)


def _linear(projections: tuple[Projection, ...], template: str, axes: str) -> Iterator[KeyPattern]:
    """Yield the patterns of a weight and of its bias, which lacks the input axis.

    ``{kind}`` in the template is ``weight`` or ``bias``; without it the bias ends with ``_bias``.
    """
    inputs = "F" if projections == _DOWN else "H"
    of_weight = tuple(axes.split())
    of_bias = tuple(axis for axis in of_weight if axis != inputs)
    for kind, ending, of in (("weight", "", of_weight), ("bias", "_bias", of_bias)):
        key = template.replace("{kind}", kind) if "{kind}" in template else template + ending
        yield KeyPattern(template=key, projections=projections, axes=of, stored=of)


_TABLE = {
    # one parameter per linear: TEGroupedLinear with --moe-single-grouped-weight, and ours
    "grouped": (
        *_linear(_GATE_UP, "linear_fc1.{kind}", "E 2F H"),
        *_linear(_DOWN, "linear_fc2.{kind}", "E H F"),
    ),
    # one parameter per expert: TEGroupedLinear, and ours
    "indexed": (
        *_linear(_GATE_UP, "linear_fc1.{kind}{expert}", "2F H"),
        *_linear(_DOWN, "linear_fc2.{kind}{expert}", "H F"),
    ),
    # Megatron's SequentialMLP
    "sequential": (
        *_linear(_GATE_UP, "local_experts.{expert}.linear_fc1.{kind}", "2F H"),
        *_linear(_DOWN, "local_experts.{expert}.linear_fc2.{kind}", "H F"),
    ),
    # Megatron's GroupedMLP, last in megatron-core 0.16, transformer/moe/experts.py: the forward
    # pass multiplies by weight1.view(E, H, 2F) and weight2.view(E, F, H), so experts are
    # consecutive in memory although the shapes suggest columns
    "legacy": (
        KeyPattern("weight1", _GATE_UP, axes=("E", "H", "2F"), stored=("H", "E*2F")),
        KeyPattern("weight2", _DOWN, axes=("E", "F", "H"), stored=("E*F", "H")),
    ),
    # fused experts of Hugging Face models
    "hf": (*_linear(_GATE_UP, "gate_up_proj", "E 2F H"), *_linear(_DOWN, "down_proj", "E H F")),
    # the same keys with inputs before outputs: gpt-oss (which interleaves by 1), Llama 4
    "hf_transposed": (
        *_linear(_GATE_UP, "gate_up_proj", "E H 2F"),
        *_linear(_DOWN, "down_proj", "E F H"),
    ),
    # one module per expert: Qwen, DeepSeek
    "hf_per_expert": (
        *_linear(_GATE, "{expert}.gate_proj.{kind}", "F H"),
        *_linear(_UP, "{expert}.up_proj.{kind}", "F H"),
        *_linear(_DOWN, "{expert}.down_proj.{kind}", "H F"),
    ),
}

LAYOUTS: dict[str, KeyLayout] = {
    name: KeyLayout(name=name, patterns=patterns) for name, patterns in _TABLE.items()
}
"""All named layouts."""
STORED_ALIKE = ("grouped", "indexed", "sequential")
"""Megatron's layouts, which are identical in ``torch_dist``; gate and up rows may alternate."""

LINEARS = ("linear_fc1", "linear_fc2")
"""Names of the linears of experts in Megatron."""
CALIBRATED_AMAX = "calibrated_amax"
"""Name of the calibrated amax of a linear's weights, [E, 1, 1] or [1, 1, 1]."""
CALIBRATED_INPUT_AMAX = "calibrated_input_amax"
"""Name of the calibrated amax of a linear's inputs, [1, 1, 1]."""

_INDEX = "(?:0|[1-9][0-9]{0,8})"  # without leading zeros and signs
_EXTRA_STATE = re.compile(  # of grouped, indexed and sequential experts
    rf"linear_fc[12]\._extra_state{_INDEX}?|local_experts\.{_INDEX}\.linear_fc[12]\._extra_state"
)


def get_layout(name: str) -> KeyLayout:
    """Return the layout called ``name``.

    Raises:
        ConfigError: no layout has this name; the message lists all names.
    """
    if name not in LAYOUTS:
        raise ConfigError(f"expert key layout: expected one of {', '.join(LAYOUTS)}, got {name!r}.")
    return LAYOUTS[name]


@cache
def _regex(template: str) -> re.Pattern[str]:
    return re.compile(re.escape(template).replace(re.escape("{expert}"), f"(?P<expert>{_INDEX})"))


def match_key(remainder: str, template: str) -> tuple[int | None] | None:
    """Return the expert of a key (None for a key of all experts), or None without a match.

    ``remainder`` follows the container's prefix; ``template`` is that of a :class:`KeyPattern`.
    """
    found = _regex(template).fullmatch(remainder)
    if found is None:
        return None
    index = found.groupdict().get("expert")
    return (None if index is None else int(index),)


def is_extra_state(remainder: str) -> bool:
    """Return whether ``remainder``, a key after the prefix, is an ``_extra_state``."""
    return _EXTRA_STATE.fullmatch(remainder) is not None


def is_calibrated_amax(remainder: str) -> bool:
    """Return whether ``remainder`` is a calibrated amax, which conversions leave unchanged."""
    linear, _, name = remainder.rpartition(".")
    return linear in LINEARS and name in (CALIBRATED_AMAX, CALIBRATED_INPUT_AMAX)


def is_of_adapter(remainder: str) -> bool:
    """Return whether ``remainder`` belongs to an adapter, which conversions leave unchanged."""
    parts = remainder.split(".")
    if parts[0] == "local_experts":
        parts = parts[2:]
    return len(parts) > 2 and parts[0] in LINEARS and parts[1] == "adapter"
