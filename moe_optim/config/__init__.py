"""Configuration of moe_optim: a frozen dataclass, validated on construction."""

# Annotations stay objects in this file (no `from __future__ import annotations`): both the checks
# below and Megatron's argument builder read them.

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from types import MappingProxyType
from typing import Any, Literal, get_args

from moe_optim.errors import ConfigError, closest, quote
from moe_optim.rules import Setup, check_setup

Format = Literal[
    "bf16", "mxfp8", "mxfp8_2d", "nvfp4", "fp8_block", "fp8_block_fp32", "mxfp8_rows", "mxfp4",
    "nvfp4_rows", "int4", "int4_g128",
]  # fmt: skip
FormatSetting = Literal["auto", Format]
Compute = Literal[Format, "int8_per_expert", "e4m3_per_expert"]
_LEAST: Mapping[str, int] = MappingProxyType({"muon_workspace_mib": 1})
"""Smallest value of numbers that are not from 0 on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MoEOptimConfig:
    """Storage, gather and GEMM formats of expert weights. Read-only."""

    format: FormatSetting = "auto"
    """Storage format of expert weights; masters are fp32. ``auto``: that of Transformer Engine's
    quantized weights; else ``mxfp8`` for portable experts, ``bf16`` for others. Formats from
    ``mxfp8_rows`` on are row-only, for portable experts: both GEMMs read the values that an
    inference engine reads."""
    compute: Compute | None = None
    """Format to which forward GEMMs quantize copies of bf16 weights; ``null``: weights as stored.
    ``int8_per_expert`` and ``e4m3_per_expert`` fake-quantize with one amax per expert, calibrated
    or current. All but ``mxfp8`` also apply to bf16 experts of Transformer Engine, copied once per
    step."""
    expert_layout: Literal["grouped", "indexed"] = "grouped"
    """``grouped``: one parameter [experts, rows, columns] per linear for all local experts;
    ``indexed``: one parameter [rows, columns] per expert."""
    storage: Literal["portable", "transformer_engine"] = "portable"
    """Container of portable experts' quantized weights: plain tensors, or Transformer Engine's
    tensor classes, which have no row-only formats. The GEMMs are the same."""
    wire: Literal["quantized", "bf16"] = "quantized"
    """Content of the parameter all-gather. ``quantized``: data and scales, quantized by the owner.
    ``bf16``: as in Megatron; every rank quantizes what it receives."""
    layout: Literal["aligned", "stock"] = "aligned"
    """Bucket ends of quantized weights. ``aligned``: shards are whole block rows if that costs at
    most 1% padding, else whole scales or bytes. ``stock``: Megatron's."""
    step: Literal["auto", "fused", "stock"] = "auto"
    """Master update. ``fused``: one launch per format and kind of weight applies Adam and
    quantizes. ``stock``: Megatron's code. ``auto``: ``fused`` with kernels, ``offload_states`` or
    Muon, except with ``backend: reference`` and with ``layout: stock``, which guarantees Megatron's
    bits (a fused norm may differ in the last)."""
    offload_states: float = 0.0
    """Fraction of this rank's masters and moments in pinned host memory between steps, in whole
    parameter shards; the GPU steps them in chunks, with the same bits. Requires a fused step.
    Default with ``--optimizer-cpu-offload``: ``--optimizer-offload-fraction``."""
    muon_gate_up: Literal["together", "apart"] = "together"
    """Matrices that Muon orthogonalizes in a gated fc1. ``together``: gate and up as one, as in
    Megatron; ``apart``: one each."""
    muon_iteration: Literal["auto", "fp16", "gram"] = "auto"
    """Newton-Schulz iteration. ``auto``: precision of ``--muon-fp32-matmul-prec``, bf16 by default;
    ``fp16``: 3 more bits of mantissa; ``gram``: fp16 on the Gram matrix, with fewer operations for
    matrices far from square."""
    muon_workspace_mib: int = 1024
    """Device memory of the Newton-Schulz iteration in MiB; the largest matrix must fit."""
    nonfinite: Literal["raise", "skip"] = "raise"
    """Action on an Inf or NaN gradient, before any weight changes."""
    backend: Literal["auto", "reference"] = "auto"
    """Quantization backend. ``auto``: Triton kernels where available, else plain torch.
    ``reference``: plain torch, with the same bytes."""
    fuse_wgrad_accumulation: bool = True
    """Whether portable experts accumulate weight gradients directly into ``main_grad``. False:
    through autograd, which allocates one gradient per weight."""
    record_amax: bool = False
    """Whether every requantization records the amax of each expert, which checkpoints then contain.
    ``nvfp4`` and ``nvfp4_rows`` always do."""
    health_interval: int = 0
    """Iterations between health samples of quantized experts; 0: none. A sample reads masters and
    weights once, and all ranks reduce a few numbers."""
    save_nonfinite: bool = False
    """Whether checkpoints with Inf or NaN in masters or moments may be saved."""
    trust_unmarked_states: bool = False
    """Whether flat optimizer states without a manifest, such as Megatron's, load by their sizes
    alone if no weights verify the order of experts. Contradicting weights are always refused."""
    trust_checkpoint_code: bool = False
    """Whether Megatron may unpickle checkpoint objects other than plain data, such as a type of
    your own among its arguments. Code that they name will run."""
    check_on_load: Literal["loaded", "thorough", "quick"] = "loaded"
    """Check of a checkpoint that loads. ``loaded``: all sizes, and checksums of what each rank
    loads; ``thorough``: first all checksums, shared among ranks; ``quick``: no checksums. Where the
    last save did not finish, ``loaded`` is ``thorough``."""

    def __post_init__(self) -> None:
        """Validate every field and their combination; raise ConfigError."""
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
            where: prefix of error messages, such as ``recipe.yaml: moe_optim``.

        Raises:
            ConfigError: keys are unknown, or values invalid; a line for each.
        """
        values: dict[str, Any] = {}
        faults: list[str] = []
        for name, value in mapping.items():
            try:
                check_key(where, name, field_names())
                values[name] = _as_number(name, value)
                _check_field(name, values[name])
            except ConfigError as error:
                faults.append(_placed(error, where))
        if faults:
            raise ConfigError("\n".join(faults))
        try:
            return cls(**values)
        except ConfigError as error:
            raise ConfigError(_placed(error, where)) from None

    def resolved(self, format: str) -> "MoEOptimConfig":
        """Return the configuration with ``format: auto`` replaced by ``format``.

        ConfigError if a field is incompatible with ``format``.
        """
        if self.format != "auto":
            return self
        return self.from_mapping(asdict(self) | {"format": format}, f"format: auto, {format} here")

    def replace_from(
        self, assignments: Iterable[str], where: str = "--moe-optim-set"
    ) -> "MoEOptimConfig":
        """Return a copy with ``key=value`` assignments applied; the last one wins.

        Args:
            assignments: words of a command line, with values spelled as in a recipe.
            where: prefix of error messages.

        Raises:
            ConfigError: words are not assignments, keys are unknown, or values invalid; a line for
                each.
        """
        changes: dict[str, object] = {}
        faults: list[str] = []
        for assignment in assignments:
            try:
                changes |= _parse_assignment(assignment, where)
            except ConfigError as error:
                faults.append(str(error))
        try:
            changed = self.from_mapping(asdict(self) | changes, where)
        except ConfigError as error:
            faults.append(str(error))
        if faults:
            raise ConfigError("\n".join(faults))
        return changed


_DECLARED: Mapping[str, Any] = {field.name: field.type for field in fields(MoEOptimConfig)}


def _placed(error: ConfigError, where: str) -> str:
    return re.sub(f"^{MoEOptimConfig.__name__}", lambda _: where, str(error))


def field_names() -> tuple[str, ...]:
    """Return the names of all fields, in declaration order."""
    return tuple(_DECLARED)


def check_key(where: str, key: object, known: Iterable[str]) -> None:
    """Raise ConfigError unless ``key`` is one of ``known``; the message lists them."""
    names = list(known)
    if key not in names:
        meant = _meant(key, names)
        remedy = f"Write {meant}, the closest of them" if meant else "Remove it"
        raise ConfigError(
            f"{where}: expected a key among {', '.join(names)}, got {quote(key)}. {remedy}."
        )


def _check_field(name: str, value: Any) -> None:
    known = available_values(name)
    if _DECLARED[name] is float:  # types must match: 1 is not true
        is_known = type(value) in (int, float) and 0 <= value <= 1
    elif isinstance(known, range):
        is_known = type(value) is int and value in known
    else:
        is_known = any(type(value) is type(one) and value == one for one in known)
    if not is_known:
        choices, meant = " or ".join(spell_values(name)), _meant(value, known)
        raise ConfigError(
            f"MoEOptimConfig: {name}: expected {choices}, got {quote(value)}. "
            f"Write {meant or choices}."
        )


def spell(value: object) -> str:
    """Format a value as in a recipe: null, true, false, and text without quotes."""
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))


def spell_values(name: str) -> list[str]:
    """Return every value of a field as text, or the range of a number."""
    values = available_values(name)
    if isinstance(values, range) or _DECLARED[name] is float:
        return [f"a number from {values[0]} to {values[-1]}"]
    return [spell(value) for value in values]


def available_values(name: str) -> Sequence[object]:
    """Return all valid values of a field; for numbers the range or its bounds."""
    declared = _DECLARED[name]
    if declared is bool:
        return True, False
    if declared is int:
        return range(_LEAST.get(name, 0), 1_000_001)
    if declared is float:
        return 0, 1
    if type(None) in get_args(declared):  # Literal[...] | None
        return None, *get_args(get_args(declared)[0])
    return get_args(declared)


def _as_number(name: str, value: object) -> object:
    """Convert text to a number for float fields; return other values unchanged."""
    if _DECLARED[name] is float and isinstance(value, str):
        with suppress(ValueError):
            return float(value)
    return value


def _meant(value: object, choices: Iterable[object]) -> str | None:
    """Return choices that contain ``value``, else the one with the closest spelling."""
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
    from moe_optim.config.recipe_yaml import merge, parse_yaml

    return merge(where, {"moe_optim": {key: parse_yaml(where, text)}})["moe_optim"]
