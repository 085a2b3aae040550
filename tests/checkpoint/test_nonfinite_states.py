"""States that are Inf or NaN are refused on all ranks, and no others are."""

from pathlib import Path

import pytest
import torch

from moe_optim.errors import NonFiniteError
from tests.support.checkpoints.checkpoint_journey import Journey, Station, owned_states
from tests.support.ranks import run_ranks

EXPERT_PARALLEL = Station(ep=2)
SHARDINGS = ("fully_reshardable", "dp_reshardable")


def _save_with(folder: Path, sharding: str, value: float) -> str:
    """Give the second rank, alone in the data-parallel group of its experts, such a moment."""
    journey = Journey(EXPERT_PARALLEL).fill()
    if torch.distributed.get_rank() == 1:
        *_, (_, _, states) = owned_states(journey.parts[-1])
        states["exp_avg"].detach().fill_(value)
    try:
        journey.save(folder, sharding)
    except NonFiniteError as error:
        return str(error)
    return "saved"


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_ranks_of_other_data_parallel_groups_refuse_as_well(sharding: str, tmp_path: Path):
    """One of them would wait for the refusing rank to save otherwise."""
    for said in run_ranks(2, _save_with, tmp_path / "saved", sharding, torch.nan):
        assert "non-finite exp_avg" in said and "save_nonfinite" in said
    assert not (tmp_path / "saved" / "metadata.json").exists()


def test_finite_states_whose_sum_is_beyond_fp32_are_saved(tmp_path: Path):
    largest = torch.finfo(torch.float32).max
    said = run_ranks(2, _save_with, tmp_path / "saved", SHARDINGS[0], largest)
    assert said == ["saved", "saved"]
