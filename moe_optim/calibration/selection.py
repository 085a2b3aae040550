"""Selection of what is calibrated, by patterns or by a ``quant_cfg`` of NVIDIA ModelOpt 0.47."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

from moe_optim.errors import ConfigError, listed

QuantCfg = Sequence[str] | Sequence[Mapping[str, Any]] | Mapping[str, Any]
"""Patterns over names of linears, or ModelOpt's rules: a list, or its older dict."""

WEIGHT, INPUT = KINDS = ("weight_quantizer", "input_quantizer")
"""ModelOpt's names of the quantizers of a linear."""

_SUPPORTED = {
    "axis": None,
    "calibrator": "max",
    "bias": None,
    "rotate": False,
    "use_constant_amax": False,
    "constant_amax": None,
}
"""Attribute of a quantizer that changes its amax -> its only supported value."""
_IGNORED = {
    "enable", "num_bits", "effective_bits", "fake_quant", "unsigned", "narrow_range", "learn_amax",
    "type", "block_sizes", "trt_high_precision_dtype", "pass_through_bwd", "backend",
    "backend_extra_args",
}  # fmt: skip
"""Attributes that do not change an amax, and ``type`` and ``block_sizes``, which are read apart."""
_MX_SCALES = ((8, 0), [8, 0], "e8m0")
_EXPERT_CLASSES = ("te_GroupedLinear", "ParallelGroupedLinear")
"""Endings of ModelOpt's names of classes of expert linears."""
_OF_ONE_EXPERT = re.compile(r"local_experts|(weight|input)_quantizers?\.")
_MOST_NAMES = 20  # maximum number of names in an error


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rule:
    where: str  # place in the argument, for errors
    pattern: str  # pattern over names of quantizers, such as LINEAR.weight_quantizer
    enable: bool
    cfg: Any = None  # attributes of these quantizers; None leaves those of earlier rules


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """Which weights and inputs are calibrated; everything by default."""

    rules: tuple[_Rule, ...] = ()  # rules in order; later ones override earlier ones
    patterns: tuple[str, ...] = ()  # patterns that must each match a linear

    @classmethod
    def of(cls, quant_cfg: QuantCfg | None) -> "Selection":
        """Return the selection of an argument; ConfigError if it is none.

        Patterns are short for rules that disable all quantizers, then enable those of matching
        linears.
        """
        if quant_cfg is None:
            return cls()
        if isinstance(quant_cfg, Mapping) and "quant_cfg" in quant_cfg:
            raise ConfigError(
                "calibrate: quant_cfg: expected patterns or rules, got a whole configuration of "
                "ModelOpt. Give its entry 'quant_cfg', and its algorithm as method."
            )
        is_text = isinstance(quant_cfg, str | bytes)
        if is_text or not isinstance(quant_cfg, Sequence | Mapping) or not quant_cfg:
            raise _unknown("quant_cfg", quant_cfg)
        patterns = tuple(one for one in quant_cfg if isinstance(one, str))
        if isinstance(quant_cfg, Mapping) or len(patterns) < len(quant_cfg):
            return cls(rules=tuple(_read_rules(quant_cfg)))
        enabled = (
            _Rule(where="quant_cfg", pattern=f"{pattern}.{kind}", enable=True)
            for pattern in patterns
            for kind in KINDS
        )
        nothing = _Rule(where="quant_cfg", pattern="*", enable=False)
        return cls(rules=(nothing, *enabled), patterns=patterns)

    def choose(self, names: Iterable[str]) -> dict[str, frozenset[str]]:
        """Return the kinds of selected quantizers of each linear of all ranks, by global name.

        As in ModelOpt, a quantizer that no rule matches is enabled, and one whose scales are all
        dynamic has no amax. ConfigError if a pattern matches no linear, rules select nothing, or a
        selected quantizer has an amax of another kind than per expert, or per tensor of inputs.
        """
        names = sorted(set(names))
        for pattern in self.patterns:
            if not any(fnmatch(name, pattern) for name in names):
                raise _matches_nothing(repr(pattern), names)
        chosen = {
            name: frozenset(kind for kind in KINDS if self._selects(f"{name}.{kind}"))
            for name in names
        }
        if not any(chosen.values()):
            raise _matches_nothing("rules that disable every quantizer", names)
        return chosen

    def _selects(self, quantizer: str) -> bool:
        matching = [rule for rule in self.rules if fnmatch(quantizer, rule.pattern)]
        if matching and not matching[-1].enable:
            return False
        last = next((rule for rule in reversed(matching) if rule.cfg is not None), None)
        return last is None or _has_amax(last, quantizer)


def _read_rules(quant_cfg: Any) -> Iterator[_Rule]:
    """Yield the rules of a list, or of the older dict of pattern -> attributes.

    Rules for a class of other modules are left out.
    """
    if isinstance(quant_cfg, Mapping):
        quant_cfg = [{pattern: cfg} for pattern, cfg in quant_cfg.items()]
    for index, entry in enumerate(quant_cfg):
        where = f"quant_cfg[{index}]"
        if hasattr(entry, "model_dump"):  # ModelOpt's QuantizerCfgEntry
            entry = entry.model_dump(exclude_unset=True)
        if not isinstance(entry, Mapping) or not entry:
            raise _unknown(where, entry)
        if "quantizer_name" in entry:
            if entry.get("parent_class") is None:
                yield _read_rule(where, **entry)
            elif str(entry["parent_class"]).endswith(_EXPERT_CLASSES):
                raise _of_other_quantizers(where, entry["parent_class"])
            continue
        for pattern, cfg in entry.items():
            if str(pattern).startswith("nn."):
                continue
            switch = {}
            if isinstance(cfg, Mapping):
                switch = {"enable": cfg["enable"]} if "enable" in cfg else {}
                cfg = {key: value for key, value in cfg.items() if key != "enable"} or None
            pattern = "*" if pattern == "default" else pattern
            yield _read_rule(where, quantizer_name=pattern, cfg=cfg, **switch)


def _read_rule(where: str, **entry: Any) -> _Rule:
    pattern, cfg, enable = (entry.get(key) for key in ("quantizer_name", "cfg", "enable"))
    is_empty = not cfg or (isinstance(cfg, list) and not any(cfg))
    if (
        entry.keys() - {"quantizer_name", "cfg", "enable", "parent_class"}
        or not isinstance(pattern, str)
        or (is_empty and enable is None)
        or (is_empty and cfg is not None and enable)
    ):
        raise _unknown(where, entry)
    if _OF_ONE_EXPERT.search(pattern):
        raise _of_other_quantizers(where, pattern)
    return _Rule(
        where=where, pattern=pattern, enable=enable is not False, cfg=None if is_empty else cfg
    )


def _of_other_quantizers(where: str, got: str) -> ConfigError:
    return ConfigError(
        f"calibrate: {where}: expected a pattern for all experts of a linear, got {got!r}. Write "
        f"'*experts.linear_fc1.{WEIGHT}', or the like."
    )


def _has_amax(rule: _Rule, quantizer: str) -> bool:
    """Return whether a quantizer has an amax; raise ConfigError if it is of another kind."""
    cfg = rule.cfg
    if not isinstance(cfg, Mapping):
        raise _unsupported(rule, quantizer, "cfg", "one quantizer", cfg)
    blocks = cfg.get("block_sizes") or {}
    has_dynamic_blocks = isinstance(blocks, Mapping) and blocks.get("type") == "dynamic"
    if cfg.get("type") == "dynamic":
        return False
    if has_dynamic_blocks and blocks.get("scale_bits") in _MX_SCALES:
        return False
    for name, value in cfg.items():
        if name in _SUPPORTED and value != _SUPPORTED[name]:
            raise _unsupported(rule, quantizer, name, repr(_SUPPORTED[name]), value)
        if name not in _SUPPORTED and name not in _IGNORED:
            raise _unsupported(rule, quantizer, name, "an attribute of a quantizer", value)
    if blocks and not has_dynamic_blocks:
        raise _unsupported(rule, quantizer, "block_sizes", "none, or 'type': 'dynamic'", blocks)
    return True


def _unsupported(rule: _Rule, quantizer: str, name: str, expected: str, got: Any) -> ConfigError:
    return ConfigError(
        f"calibrate: {rule.where}: {name}: expected {expected} for {quantizer}, got {got!r}. There "
        "is one amax per expert of weights, and one per linear of inputs, each the largest "
        "magnitude: disable this quantizer in a later rule, or calibrate it with ModelOpt."
    )


def _unknown(where: str, got: Any) -> ConfigError:
    return ConfigError(
        f"calibrate: {where}: expected patterns such as '*.linear_fc1', or rules of ModelOpt with "
        f"quantizer_name and cfg or enable, got {got!r}. Give one of them."
    )


def _matches_nothing(got: str, names: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"calibrate: quant_cfg: expected to select some of the expert linears, got {got}. Match "
        f"some of these names: {listed(names, most=_MOST_NAMES)}."
    )
