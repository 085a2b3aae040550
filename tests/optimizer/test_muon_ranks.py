"""A step of matrices that two tensor-parallel ranks cut is that of the whole matrices."""

from dataclasses import replace

import torch
import torch.distributed as dist

from moe_optim.formats.reference.newton_schulz import Orthogonalization
from moe_optim.optimizer.muon_step import MuonState
from tests.support.bytes import assert_bytes_equal
from tests.support.ranks import on_ranks
from tests.support.steps.muon_steps import DEFAULTS, expected_step, make_states, step, weight_of

ROWS, COLS, COUNT = 64, 96, 3
SPLITS = [(), (16, 8, 8), (16, 16)]
"""One matrix; queries, keys and values; alternating gate and up: periods of half of the rows."""
SETTINGS = replace(
    DEFAULTS,
    orthogonalization=Orthogonalization(precision="highest", scale_mode="unit_rms_norm"),
    nesterov=True,
)


def _own(values: torch.Tensor, dim: int) -> torch.Tensor:
    """Return this rank's half of rows or columns of all weights, [n]."""
    halves = values.view(COUNT, ROWS, COLS).chunk(2, dim + 1)
    return halves[dist.get_rank()].reshape(-1)


def _own_part(state: MuonState, dim: int) -> MuonState:
    rows, cols = (ROWS // 2, COLS) if dim == 0 else (ROWS, COLS // 2)
    return replace(
        state,
        matrix=replace(state.matrix, shape=(rows, cols), partition_dim=dim, group=dist.group.WORLD),
        master=_own(state.master, dim),
        gradient=_own(state.gradient, dim),
        momentum=_own(state.momentum, dim),
        weight=None,
    )


CUTS = [(mode, dim) for mode in ("duplicated", "distributed") for dim in (0, 1)]
"""How tensor parallelism treats matrices, and whether it cuts rows or columns."""


def _step_parts(mode: str, dim: int) -> int:
    """Compare a step of this rank's parts, next to a weight that is not cut, with the whole."""
    settings = replace(SETTINGS, tp_mode=mode)
    whole = make_states([(weight_of(ROWS, COLS, split), COUNT) for split in SPLITS])
    expected = [expected_step(state, settings, clip=0.5) for state in whole]
    (uncut,) = make_states([(weight_of(ROWS, COLS), 1)])
    parts = [_own_part(state, dim) for state in whole]
    step([parts[0], replace(uncut, group=0), *parts[1:]], settings, clip=0.5)
    for state, part, (master, momentum) in zip(whole, parts, expected, strict=True):
        assert_bytes_equal(part.momentum, _own(momentum, dim), what="momentum")
        moved = (_own(master, dim) - _own(state.master, dim)).norm()
        assert (part.master - _own(master, dim)).norm() <= 1e-4 * moved
    return len(parts)


@on_ranks(2)
def test_parts_of_matrices_move_as_the_whole_ones():
    """In fp32, whose sums depend on their order: momentum to the bit, masters but for rounding."""
    dist.init_process_group("gloo")
    assert sum(_step_parts(mode, dim) for mode, dim in CUTS) == len(CUTS) * len(SPLITS)
