"""The configuration of moe_optim: one frozen value, checked when it is built."""

# Annotations stay objects in this file (no `from __future__ import annotations`): both the checks
# below and Megatron's argument builder read them.

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from moe_optim.config.recipe_yaml import merge, parse_yaml, quote
from moe_optim.errors import ConfigError, closest
from moe_optim.rules import Setup, check_setup

Format = Literal["bf16", "mxfp8", "mxfp8_2d", "nvfp4", "fp8_block"]
FormatSetting = Literal["auto", Format]
Compute = Literal[Format, "int8_per_expert", "e4m3_per_expert"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MoEOptimConfig:
    """How expert weights are stored, gathered and multiplied. Built once, read-only afterwards."""

    format: FormatSetting = "auto"
    """Storage format of expert weights between two optimizer steps; masters are always fp32.
    ``auto``: that of the weights which Transformer Engine makes with ``--fp8-param-gather`` or
    ``--fp4-param-gather``, ``mxfp8`` for portable experts, else ``bf16``. FP8 weights with one
    scale each (``--fp8-recipe tensorwise``) stay in Megatron's buffers."""
    compute: Compute | None = None
    """Format of the expert products, for ``format: bf16``: bf16 primary weights, of which every
    forward product makes a quantized copy that it reads. ``int8_per_expert`` and
    ``e4m3_per_expert`` fake-quantize by one amax an expert: that of a calibration, or that of the
    weights as they are. ``null`` multiplies in ``format``."""
    expert_layout: Literal["grouped", "indexed"] = "grouped"
    """``grouped`` keeps all local experts of a linear in one parameter [experts, rows, columns],
    ``indexed`` keeps one parameter [rows, columns] an expert."""
    storage: Literal["portable", "transformer_engine"] = "portable"
    """What portable experts keep quantized weights in: plain tensors, or the tensor classes of
    Transformer Engine, whose own modules bring theirs. The products are the same."""
    wire: Literal["quantized", "bf16"] = "quantized"
    """What the parameter all-gather carries. ``quantized``: bytes and block scales, quantized by
    the rank that owns them. ``bf16``: as Megatron; every rank quantizes what it received."""
    layout: Literal["aligned", "stock"] = "aligned"
    """Where buckets of quantized weights end. ``aligned``: where shards become whole block rows, if
    that costs 1% or less, else whole scales or bytes. ``stock``: where Megatron ends them."""
    step: Literal["auto", "fused", "stock"] = "auto"
    """Who updates masters. ``fused``: one launch a format and kind of weight, which reads gradients
    where they lie, takes Adam's step and encodes what it has stepped. ``stock``: Megatron's code,
    one part after the other. ``auto``: ``fused`` where kernels run, or ``offload_states`` asks for
    it, except with ``backend: reference``, and with ``layout: stock``: its promise are Megatron's
    bits, and the last bit of a fused norm may be another."""
    offload_states: float = 0.0
    """Part of this rank's masters and moments that lies in pinned memory of the host between steps,
    as whole shards of parameters, evenly over the layers. They pass through the GPU in chunks while
    others are stepped. Nothing else changes, not a bit. Takes a fused step. With
    ``--optimizer-cpu-offload`` its default is ``--optimizer-offload-fraction``."""
    nonfinite: Literal["raise", "skip"] = "raise"
    """What an Inf or NaN gradient does to the step, before any weight has moved."""
    backend: Literal["auto", "reference"] = "auto"
    """Who quantizes. ``auto``: Triton kernels where they run, else plain torch. ``reference``:
    plain torch everywhere, with the same bytes."""
    fuse_wgrad_accumulation: bool = True
    """Whether portable experts add weight gradients straight into ``main_grad``. False sends them
    through autograd, which allocates one gradient a weight."""
    record_amax: bool = False
    """Whether every requantization records the amax of each expert, which checkpoints then hold.
    ``nvfp4`` needs these amaxes itself, and records them always."""
    health_interval: int = 0
    """Iterations from one health sample of quantized experts to the next; 0 takes none. A sample is
    one pass over masters and weights and small all-reduces over all ranks, and nothing waits for
    it. What it writes and warns of: see Health."""
    save_nonfinite: bool = False
    """Whether a checkpoint may be saved whose masters or moments hold Inf or NaN."""
    trust_unmarked_states: bool = False
    """Whether flat optimizer states without a manifest, such as Megatron saves, load by their sizes
    alone where no weights are given that show whose the masters are. Weights that contradict are
    refused either way."""
    trust_checkpoint_code: bool = False
    """Whether Megatron may unpickle objects of a checkpoint that name more than plain data, such as
    a type of your own among its arguments. Whatever they name is run."""
    check_on_load: Literal["thorough", "quick"] = "thorough"
    """What is checked before a checkpoint loads. ``thorough`` reads all of it once, shared among
    ranks, and compares checksums; ``quick`` looks for missing and cut files."""

    def __post_init__(self) -> None:
        """Check every field once, and what does not go together.

        Raises:
            ConfigError: a field with a value that it does not take, or fields that do not go
                together.
        """
        for name in field_names():
            _check_field(name, getattr(self, name))
        check_setup(Setup(config=self), type(self).__name__)

    def changes(self) -> str:
        """Return the fields that differ from their defaults, as ``key=value``, or "defaults"."""
        changed = [
            f"{field.name}={spell(value)}"
            for field in fields(self)
            if (value := getattr(self, field.name)) != field.default
        ]
        return ", ".join(changed) or "defaults"

    @classmethod
    def from_mapping(
        cls, mapping: Mapping[str, object], where: str = "moe_optim"
    ) -> "MoEOptimConfig":
        """Return the configuration of a mapping; absent keys keep their default.

        Args:
            mapping: field name -> value, as read from a recipe.
            where: beginning of errors, such as ``recipe.yaml: moe_optim``.

        Raises:
            ConfigError: an unknown key, or a value its field does not take.
        """
        for name in mapping:
            check_key(where, name, field_names())
        values: dict[str, Any] = {key: _as_number(key, value) for key, value in mapping.items()}
        try:
            return cls(**values)
        except ConfigError as error:
            raise ConfigError(f"{where}{str(error).removeprefix(cls.__name__)}") from None

    def resolved(self, format: str) -> "MoEOptimConfig":
        """Return the configuration with ``format`` in the place of ``auto``; others stay.

        Raises:
            ConfigError: a field that does not go with ``format``.
        """
        if self.format != "auto":
            return self
        return self.from_mapping(asdict(self) | {"format": format}, f"format: auto, {format} here")

    def replace_from(
        self, assignments: Iterable[str], where: str = "--moe-optim-set"
    ) -> "MoEOptimConfig":
        """Return a copy with ``key=value`` assignments applied, the last one winning.

        Args:
            assignments: words of a command line, with values spelled as in a recipe.
            where: beginning of errors.

        Raises:
            ConfigError: not an assignment, an unknown key, or a value its field does not take.
        """
        changes: dict[str, object] = {}
        for assignment in assignments:
            changes |= _parse_assignment(assignment, where)
        return self.from_mapping(asdict(self) | changes, where)


def field_names() -> tuple[str, ...]:
    """Return the names of all fields, in the order of their declaration."""
    return tuple(field.name for field in fields(MoEOptimConfig))


def check_key(where: str, key: object, known: Iterable[str], *, is_shown: bool = True) -> None:
    """Raise ConfigError unless ``key`` is one of ``known``; the message lists them.

    Args:
        where: beginning of errors.
        key: key of the mapping.
        known: all valid keys.
        is_shown: whether the message repeats ``key``, which may be a line of any file.
    """
    names = list(known)
    if key not in names:
        meant = _meant(key, names)
        remedy = f"Write {meant}, the closest of them" if meant else "Remove it"
        got = quote(key) if is_shown else "another"
        raise ConfigError(f"{where}: expected a key among {', '.join(names)}, got {got}. {remedy}.")


def _check_field(name: str, value: object) -> None:
    known = available_values(name)
    if _takes(name, value, known):
        return
    choices = " or ".join(spell_values(name))
    meant = _meant(value, known)
    raise ConfigError(
        f"MoEOptimConfig: {name}: expected {choices}, got {quote(value)}. Write {meant or choices}."
    )


def spell(value: object) -> str:
    """Spell a value as a recipe does: null, true, false, and text without quotes."""
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))


def spell_values(name: str) -> list[str]:
    """Spell out every value of a field, or the range of a number."""
    values = available_values(name)
    if isinstance(values, range) or _declared(name) is float:
        return [f"a number from {values[0]} to {values[-1]}"]
    return [spell(value) for value in values]


def available_values(name: str) -> Sequence[object]:
    """Return all values that the type of a field allows; of numbers the range or its ends."""
    declared = _declared(name)
    if declared is bool:
        return True, False
    if declared is int:
        return range(1_000_001)
    if declared is float:
        return 0, 1
    if type(None) in get_args(declared):  # Literal[...] | None
        return None, *get_args(get_args(declared)[0])
    return get_args(declared)


def _declared(name: str) -> Any:
    (declared,) = (field.type for field in fields(MoEOptimConfig) if field.name == name)
    return declared


def _as_number(name: str, value: object) -> object:
    """Return a fraction that a recipe spells as text as a number, any other value as it is."""
    if _declared(name) is not float or not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        return value


def _takes(name: str, value: object, choices: Sequence[object]) -> bool:
    # type included: 1 is not true
    if isinstance(choices, range):
        return type(value) is int and value in choices
    if _declared(name) is float:
        return isinstance(value, float | int) and not isinstance(value, bool) and 0 <= value <= 1
    return any(type(value) is type(choice) and value == choice for choice in choices)


def _meant(value: object, choices: Iterable[object]) -> str | None:
    """Return choices that contain ``value``, or else the one spelt most like it."""
    text = str(value).lower()
    texts = [choice for choice in choices if isinstance(choice, str)]
    whole = [choice for choice in texts if len(text) > 2 and text in choice]
    return " or ".join(whole) or closest(text, texts)


def _parse_assignment(assignment: str, where: str) -> dict[str, object]:
    key, equals, text = assignment.partition("=")
    if not equals or not key.strip():
        raise ConfigError(
            f"{where}: expected key=value, got {quote(assignment)}. Write for example format=bf16."
        )
    where = f"{where}: {quote(assignment)}"
    check_key(where, key, field_names())
    return merge(where, {"moe_optim": {key: parse_yaml(where, text)}})["moe_optim"]
