"""Steps of Muon over made-up weights, and the same steps by emerging-optimizers."""

from collections.abc import Sequence
from typing import Any

import torch
from emerging_optimizers.orthogonalized_optimizers import Muon as OneAtATime
from torch import Tensor

from moe_optim.formats.reference.newton_schulz import Orthogonalization
from moe_optim.kernels.fields import HYPER_FIELDS
from moe_optim.kernels.member_table import MemberTable
from moe_optim.optimizer.muon import MatrixWeight, MuonSettings, hyper_of
from moe_optim.optimizer.muon_step import (
    MuonState,
    MuonTable,
    common_scale_of,
    needed_bytes,
)
from tests.support.matrix_rows import indices_of

GROUPS: tuple[dict[str, Any], ...] = (
    {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1},
    {"lr": 0.05, "momentum": 0.7, "weight_decay": 0.3},
)
"""Rates of states, which take turns."""
OF_NORMS = (0.5, 1.0)
"""Parts of a clip factor by norm; states take turns, from the last one on."""
DEFAULTS = MuonSettings(
    orthogonalization=Orthogonalization(),
    nesterov=False,
    tp_mode="blockwise",
    splits_qkv=True,
    splits_gate_up=False,
    iteration="auto",
    workspace_bytes=1 << 30,
)


def weight_of(rows: int, cols: int, split: tuple[int, ...] = (), name: str = "w") -> MatrixWeight:
    """Return a weight that no tensor parallelism cuts."""
    return MatrixWeight(
        name=name,
        shape=(rows, cols),
        split=split,
        is_expert=False,
        partition_dim=None,
        group=None,
    )


def make_states(
    weights: Sequence[tuple[MatrixWeight, int]], seed: int = 0, device: str = "cpu"
) -> list[MuonState]:
    """Return random states: a weight, and how many of it, each."""
    made = torch.Generator().manual_seed(seed)
    states = []
    for index, (weight, count) in enumerate(weights):
        master, gradient, momentum = (
            (torch.randn(count * weight.numel, generator=made) * scale).to(device)
            for scale in (0.1, 1e-3, 1e-3)
        )
        states.append(
            MuonState(
                parameter=weight.name,
                matrix=weight,
                master=master,
                gradient=gradient,
                momentum=momentum,
                group=index,
                norm=(index + 1) % 2,
                weight=master.bfloat16(),
            )
        )
    return states


def step(
    states: Sequence[MuonState],
    settings: MuonSettings = DEFAULTS,
    clip: float = 1.0,
    members: Sequence[MemberTable] = (),
) -> MuonTable:
    """Step states in place with one table, and return it."""
    how = settings.orthogonalization
    device = states[0].master.device if states else torch.device("cpu")
    hyper = torch.zeros(max(len(states), 1), HYPER_FIELDS, device=device)
    for state in states:
        scale = common_scale_of(state.matrix, settings)
        row = hyper_of(_rates_of(state), scale, how.extra_scale_factor).row()
        hyper[state.group, : len(row)] = torch.tensor(row)
    nbytes = needed_bytes([(state.matrix, state.count) for state in states], settings)
    workspace = torch.empty(nbytes, dtype=torch.uint8, device=device)
    clips = torch.tensor([clip * factor for factor in OF_NORMS], device=device)
    table = MuonTable.build(states, settings, hyper, clips, workspace, members=members)
    table.launch()
    return table


def _rates_of(state: MuonState) -> dict[str, Any]:
    return GROUPS[state.group % len(GROUPS)]


def expected_step(state: MuonState, settings: MuonSettings, clip: float) -> tuple[Tensor, Tensor]:
    """Step every matrix apart with emerging-optimizers; return masters and momenta."""
    how, (rows, cols) = settings.orthogonalization, state.matrix.shape
    masters, gradients, momenta = (
        one.clone().view(-1, rows, cols) for one in (state.master, state.gradient, state.momentum)
    )
    for number in range(state.count):
        for of_matrix in state.matrix.rows:
            taken = indices_of(of_matrix)
            matrix = torch.nn.Parameter(masters[number, taken])
            matrix.grad = gradients[number, taken] * (clip * OF_NORMS[state.norm])
            stock = OneAtATime(
                [matrix],
                **_rates_of(state),
                nesterov=settings.nesterov,
                fp32_matmul_prec=how.precision,
                coefficient_type=how.coefficient_type,  # type: ignore[arg-type]
                num_ns_steps=how.num_steps,
                scale_mode=how.scale_mode,
                extra_scale_factor=how.extra_scale_factor,
            )
            stock.state[matrix]["momentum_buffer"] = momenta[number, taken]
            stock.step()
            masters[number, taken] = matrix.detach()
            momenta[number, taken] = stock.state[matrix]["momentum_buffer"]
    return masters.view(-1), momenta.view(-1)
