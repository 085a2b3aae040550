"""Conversion of amaxes of expert inputs between NVIDIA ModelOpt's keys and ours.

ModelOpt (0.47) keeps them in input quantizers: one of a grouped linear, or one in each expert of a
``SequentialMLP``, with the same value after its synchronization.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_optim.calibration.calibrated_amax import are_magnitudes, as_buffer
from moe_optim.experts.keys.layouts import CALIBRATED_INPUT_AMAX, LINEARS, match_key

_GROUPED = "{linear}.input_quantizer._amax"
_SEQUENTIAL = f"local_experts.{{expert}}.{_GROUPED}"


@dataclass(frozen=True, kw_only=True, slots=True)
class InputAmaxes:
    """Amaxes of the inputs of one layer's experts in a state dict."""

    prefix: str
    """Prefix of all keys."""
    ours: Mapping[str, str]
    """Linear -> key of our amax."""
    theirs: Mapping[str, Sequence[str]]
    """Linear -> keys of ModelOpt's amaxes, in any form."""

    @classmethod
    def of(cls, prefix: str, keys: Mapping[str, str]) -> "InputAmaxes":
        """Find the amaxes in a container's keys by remainder."""
        ours, theirs = {}, dict[str, list[str]]()
        for linear in LINEARS:
            if (remainder := f"{linear}.{CALIBRATED_INPUT_AMAX}") in keys:
                ours[linear] = keys[remainder]
            templates = [one.replace("{linear}", linear) for one in (_GROUPED, _SEQUENTIAL)]
            found = [key for r, key in keys.items() if any(match_key(r, t) for t in templates)]
            if found:
                theirs[linear] = found
        return cls(prefix=prefix, ours=ours, theirs=theirs)

    def to_modelopt(
        self, state: Mapping[str, Any], form: str, num_experts: int | None
    ) -> tuple[dict[str, dict[str, Tensor]], list[str]]:
        """Return the entries that replace each of our keys, and all faults."""
        template, experts = _GROUPED, range(1)
        faults = self._doubled()
        if form == "sequential" and self.ours:
            if num_experts is None:
                faults += [
                    f"{key}: expected weights or amaxes of each expert beside it"
                    for key in self.ours.values()
                ]
            template, experts = _SEQUENTIAL, range(num_experts or 0)
        renamed = {}
        for linear, key in self.ours.items():
            amax, new_faults = _read(state, [key])
            faults += new_faults
            if amax is None:
                continue
            keys = [
                self.prefix + template.replace("{linear}", linear).replace("{expert}", str(e))
                for e in experts
            ]
            renamed[key] = {one: amax[0, 0, 0].clone() for one in keys}
        return renamed, faults

    def from_modelopt(
        self, state: Mapping[str, Any]
    ) -> tuple[dict[str, dict[str, Tensor]], list[str]]:
        """Return the entries that replace the first of ModelOpt's keys of a linear, and all faults.

        The amax of inputs is the largest of a linear's experts.
        """
        faults, renamed = self._doubled(), {}
        for linear, keys in self.theirs.items():
            amax, new_faults = _read(state, keys)
            faults += new_faults
            if amax is not None:
                renamed[keys[0]] = {f"{self.prefix}{linear}.{CALIBRATED_INPUT_AMAX}": amax}
        return renamed, faults

    def _doubled(self) -> list[str]:
        both = (linear for linear in self.ours if linear in self.theirs)
        return [
            f"{self.ours[one]}: expected one amax, got also {self.theirs[one][0]}" for one in both
        ]


def _read(state: Mapping[str, Any], keys: Sequence[str]) -> tuple[Tensor | None, list[str]]:
    """Return the largest amax under some keys, [1, 1, 1] fp32, or None and all faults."""
    amaxes, faults = [], []
    for key in keys:
        value = state[key]
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.numel() != 1:
            got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            faults.append(f"{key}: expected one floating-point amax of all inputs, got {got}")
        elif not are_magnitudes(value):
            faults.append(f"{key}: expected a finite magnitude, got {value.item()}")
        else:
            amaxes.append(as_buffer(value))
    return (None if faults else torch.stack(amaxes).amax(0)), faults
