"""Experts of every kind that is calibrated, with weights that plain torch knows the amaxes of."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from moe_optim.config import MoEOptimConfig
from moe_optim.formats import FORMATS, reference
from tests.support.inputs import wide_range_weights
from tests.support.modules import experts
from tests.support.modules.amax import amax_of

EXPERTS, HIDDEN, FFN = 4, 64, 64
LINEARS = {"linear_fc1": (2 * FFN, HIDDEN), "linear_fc2": (HIDDEN, FFN)}
"""Rows and columns of one expert."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Who owns the weights, in which format, and whether one holds all experts of a linear."""

    owner: str
    format: str
    single: bool

    def __str__(self) -> str:
        return f"{self.owner}, {self.format}, {'one weight' if self.single else 'one an expert'}"


KINDS = [
    Kind(owner=owner, format=format, single=single)
    for owner, format, single in (
        ("portable", "bf16", True),
        ("portable", "bf16", False),
        ("portable", "mxfp8", True),
        ("portable", "mxfp8", False),
        ("portable", "nvfp4", True),
        ("Transformer Engine", "bf16", True),
        ("Transformer Engine", "bf16", False),
        ("Transformer Engine", "mxfp8", False),
        ("Transformer Engine", "mxfp8_2d", True),
        ("Transformer Engine", "nvfp4", False),
    )
]


def whole_weights(linear: str, seed: int = 0) -> torch.Tensor:
    """Return bf16 weights [E, R, C] of all experts, whose amaxes differ and are none of E4M3's."""
    weights = wide_range_weights(EXPERTS, *LINEARS[linear], seed=seed + len(linear)).clamp(-1, 1)
    weights[:, 3, 5] = 1 + 2**-5
    scale = torch.arange(1, EXPERTS + 1).view(-1, 1, 1) * (1 if linear == "linear_fc1" else -3)
    return (weights * scale).bfloat16()


def want_amax(kind: Kind, weights: torch.Tensor) -> torch.Tensor:
    """Return the amax of each expert as products read its weight [E, R, C], in plain torch."""
    if kind.format == "bf16":
        return amax_of(weights)
    quantized = reference.quantize(weights, FORMATS[kind.format])
    return amax_of(reference.dequantize(quantized))


def local_part(linear: str, weights: torch.Tensor, ep: int = 1, tp: int = 1) -> torch.Tensor:
    """Return what this rank holds: its experts, and of these rows of gate and up, or columns."""
    rank = dist.get_rank()
    mine = weights.chunk(ep)[rank // tp % ep]
    if linear == "linear_fc1":
        gate_and_up = mine.unflatten(1, (2, -1)).chunk(tp, 2)[rank % tp]
        return gate_and_up.flatten(1, 2).contiguous()
    return mine.chunk(tp, 2)[rank % tp].contiguous()


def make(kind: Kind, ep: int = 1, tp: int = 1, seed: int = 0) -> Any:
    """Return experts of this rank with their part of :func:`whole_weights`, under the plug-in."""
    from moe_optim.experts.module import GroupedExperts
    from moe_optim.integration import installation
    from tests.support.te.te_experts import make_experts

    installation.uninstall()
    layout = "grouped" if kind.single else "indexed"
    knobs = MoEOptimConfig(format=kind.format, expert_layout=layout)
    installation.install(knobs)
    config = experts.make_config(
        hidden_size=HIDDEN,
        moe_ffn_hidden_size=FFN,
        num_moe_experts=EXPERTS,
        expert_model_parallel_size=ep,
        tensor_model_parallel_size=tp,
        expert_tensor_parallel_size=tp,
    )
    groups = experts._seeded_groups()
    if kind.owner == "portable":
        module = GroupedExperts(
            EXPERTS // ep, config, moe_optim_config=knobs, pg_collection=groups, name="experts"
        )
    else:
        format = FORMATS.get(kind.format)
        options: dict[str, Any] = {"single": kind.single, "format": format}
        module = make_experts(EXPERTS // ep, config, pg_collection=groups, **options)
    fill(module, {name: local_part(name, whole_weights(name, seed), ep, tp) for name in LINEARS})
    return module


@torch.no_grad()
def fill(module: Any, weights: dict[str, torch.Tensor]) -> None:
    """Give linears weights [E, R, C], as if they had been loaded."""
    for name, values in weights.items():
        linear = module.get_submodule(name)
        if hasattr(linear, "load_values"):
            linear.load_values(values)
            continue
        parts = [values] if linear.single_grouped_weight else values.unbind(0)
        for (weight, old), part in zip(linear._parameters.items(), parts, strict=True):
            if linear.format is None:
                old.copy_(part)
            else:
                linear._parameters[weight] = linear._stand_in(part)


def values_of(module: Any) -> dict[str, torch.Tensor]:
    """Return the values of every expert as GEMMs read them, by linear."""
    from moe_optim.calibration.linears import expert_linears

    return {one.name: torch.stack(list(one.values())) for one in expert_linears(module)}


def amaxes_of(module: Any) -> dict[str, torch.Tensor | None]:
    """Return what the linears hold, by name."""
    from moe_optim import calibrated_amax

    return {name: calibrated_amax(module.get_submodule(name)) for name in LINEARS}
