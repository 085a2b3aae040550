"""State dicts of experts whose every element tells where it belongs, in every layout by hand."""

from dataclasses import dataclass
from typing import Any

import torch

PREFIX = "decoder.layers.3.mlp.experts."
ALL_LAYOUTS = ("grouped", "indexed", "sequential", "legacy", "hf", "hf_transposed", "hf_per_expert")
FUSED_LAYOUTS = tuple(name for name in ALL_LAYOUTS if name != "hf_per_expert")
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class Experts:
    """The experts of one layer, projections apart."""

    gate: torch.Tensor  # [E, F, H]
    up: torch.Tensor  # [E, F, H]
    down: torch.Tensor  # [E, H, F]
    gate_bias: torch.Tensor | None = None  # [E, F]
    up_bias: torch.Tensor | None = None  # [E, F]
    down_bias: torch.Tensor | None = None  # [E, H]

    def take(self, experts: slice) -> "Experts":
        """Return some of them."""
        return Experts(**{k: None if v is None else v[experts] for k, v in vars(self).items()})

    def cut(self, rank: int, size: int) -> "Experts":
        """Return the part of every expert that a rank of tensor parallelism holds."""
        axes = {"gate": 1, "up": 1, "down": 2, "gate_bias": 1, "up_bias": 1}
        return Experts(
            **{
                k: v.chunk(size, axes[k])[rank] if k in axes and v is not None else v
                for k, v in vars(self).items()
            }
        )


def make_experts(
    num_experts: int,
    ffn: int,
    hidden: int,
    *,
    bias: bool = False,
    dtype: torch.dtype = torch.float32,
    first: int = 0,
) -> Experts:
    """Return experts whose elements are the bit patterns of ``first``, ``first + 1`` and so on.

    No two are alike up to the number of patterns that the dtype has.
    """
    shapes = {"gate": (ffn, hidden), "up": (ffn, hidden), "down": (hidden, ffn)}
    if bias:
        shapes |= {"gate_bias": (ffn,), "up_bias": (ffn,), "down_bias": (hidden,)}
    experts = {}
    for name, shape in shapes.items():
        numel = num_experts * torch.Size(shape).numel()
        bits = torch.arange(first, first + numel, dtype=torch.int64)
        assert dtype.itemsize > 1 or first + numel <= 256
        bits = bits.to(INTEGERS[dtype.itemsize])
        experts[name] = bits.view(dtype).view(num_experts, *shape)
        first += numel
    return Experts(**experts)


def alternate(gate: torch.Tensor, up: torch.Tensor, size: int | None) -> torch.Tensor:
    """Join the rows of one expert: gates first, or ``size`` gates, ``size`` ups, and so on."""
    rows = []
    size = size or len(gate)
    for start in range(0, len(gate), size):
        rows += [*gate[start : start + size], *up[start : start + size]]
    return torch.stack(rows)


def make_state(
    experts: Experts, layout: str, *, interleave: int | None = None, prefix: str = PREFIX
) -> dict[str, torch.Tensor]:
    """Return the experts under the keys of a layout, written out key by key."""
    each = range(len(experts.gate))
    linears = {
        "linear_fc1.weight": [alternate(experts.gate[e], experts.up[e], interleave) for e in each],
        "linear_fc2.weight": [*experts.down],
    }
    if experts.down_bias is not None:
        biases = zip(experts.gate_bias, experts.up_bias, strict=True)
        linears["linear_fc1.bias"] = [alternate(*pair, interleave) for pair in biases]
        linears["linear_fc2.bias"] = [*experts.down_bias]
    if layout == "hf_per_expert":
        state = _split_projections(experts)
    elif layout == "legacy":
        state = _legacy(linears)
    elif layout in ("hf", "hf_transposed"):
        state = _fused(linears, transposed=layout == "hf_transposed")
    elif layout == "grouped":
        state = {name: torch.stack(parts) for name, parts in linears.items()}
    else:
        names = {"indexed": "{name}{e}", "sequential": "local_experts.{e}.{name}"}[layout]
        state = {
            names.format(e=e, name=name): parts[e].clone()
            for name, parts in linears.items()
            for e in each
        }
    return {prefix + key: value for key, value in state.items()}


def _split_projections(experts: Experts) -> dict[str, torch.Tensor]:
    state = {}
    for e in range(len(experts.gate)):
        for name in ("gate", "up", "down"):
            state[f"{e}.{name}_proj.weight"] = getattr(experts, name)[e].clone()
            if experts.down_bias is not None:
                state[f"{e}.{name}_proj.bias"] = getattr(experts, f"{name}_bias")[e].clone()
    return state


def _legacy(linears: dict[str, list[torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Expert after expert, inputs before outputs; a shape as if they lay side by side."""
    flat = {
        name: torch.cat([part.t().reshape(-1) for part in parts]) for name, parts in linears.items()
    }
    hidden = linears["linear_fc1.weight"][0].shape[1]
    return {
        "weight1": flat["linear_fc1.weight"].view(hidden, -1),
        "weight2": flat["linear_fc2.weight"].view(-1, hidden),
    }


def _fused(linears: dict[str, list[torch.Tensor]], transposed: bool) -> dict[str, torch.Tensor]:
    names = {"linear_fc1": "gate_up_proj", "linear_fc2": "down_proj"}
    state = {}
    for name, parts in linears.items():
        linear, _, kind = name.partition(".")
        key = names[linear] + ("_bias" if kind == "bias" else "")
        flip = transposed and kind == "weight"
        state[key] = torch.stack([part.t() if flip else part for part in parts])
    return state


def shapes_of(state: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a state dict."""
    return {key: tuple(value.shape) for key, value in state.items()}
